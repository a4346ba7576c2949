"""LEAF: what a format is (`FormatTraits`), and the modules that every format's folder has.

Imports no torch: `runtime_ref` and the configuration read the traits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from exporter.spec import (
    CheckResult,
    DType,
    FormatOptions,
    Layout,
    Manifest,
    MethodSpec,
    ProgramSpec,
    Recipe,
    StateSpec,
)

if TYPE_CHECKING:
    from torch import Tensor

    from exporter.cache.interface import CacheKernels
    from exporter.describe import FileDescription
    from exporter.graph.contract import ProgramContract
    from exporter.graph.contract_file import ContractFile
    from exporter.model.decoder import Decoder
    from exporter.programs import Limits

Step = Callable[[str], AbstractContextManager[Callable[[str], None]]]


class Effort(NamedTuple):
    """What full verification runs: tokens of text, greedy tokens, the chunk lengths of the text.

    The last `tail` tokens of the text go one by one for every chunk length, and the NLL is over them; with 0 it is over
    the whole text, in chunks of 1.
    """

    tokens: int
    greedy: int
    chunks: tuple[int, ...]
    tail: int = 0

    def within(self, context: int) -> Effort:
        """As much of it as a context of so many tokens has room for."""
        greedy = min(self.greedy, (context - 2) // 2)
        tokens = min(self.tokens, context - greedy)
        return self._replace(tokens=tokens, greedy=greedy, tail=min(self.tail, tokens // 2))


@dataclass(frozen=True, kw_only=True)
class FormatTraits:
    """The traits of one format, for all code outside its folder.

    Args:
        name: in configs, manifests and on the command line; the folder's name.
        title: its makers' name.
        file: the program's name in a bundle. Its suffix tells the format of a file alone.
        options: the section of the YAML.
        layout: how a program takes its states.
        ids_dtype: of `input_ids` and `position_ids`.
        state_dtype: of every state; None means the cache policy's.
        cache_dtypes: what `cache.dtype` and `cache.global_dtype` may be.
        decoder_is_rounded: whether the decoder that is traced rounds weights and activations already, as the program
            will; otherwise the back end rounds weights while it converts, and computes in floats.
        half_arithmetic: whether the program computes in float16.
        checks: the names of the graph checks of a program file.
        limits: the limits of a contract that its checks read (`graph.contract_file.LIMIT_CHECKS`).
        self_describing: whether a file alone says what it is; otherwise it needs a manifest or a contract.
        effort: of verification in its full form.
        distributions: the Python distributions that the file depends on, whose versions the manifest records.
        extra: the pip extra that brings them; None if they are always there.
        platforms: where those packages have wheels.
    """

    name: str
    title: str
    file: str
    options: type[FormatOptions]
    layout: Layout
    ids_dtype: str
    state_dtype: DType | None
    cache_dtypes: tuple[DType, ...]
    decoder_is_rounded: bool
    half_arithmetic: bool = False
    checks: tuple[str, ...]
    limits: frozenset[str] = field(default=frozenset())
    self_describing: bool
    effort: Effort
    distributions: tuple[str, ...]
    extra: str | None = None
    platforms: str = "every platform of torch"

    @property
    def suffix(self) -> str:
        return Path(self.file).suffix


class Program(Protocol):
    """A loaded program: runs the methods of one model on state that the caller owns."""

    def run(self, method: str, input_ids: Tensor, position_ids: Tensor, states: Sequence[Tensor]) -> Tensor:
        """Run one method.

        Args:
            method: a name in `spec.PROGRAMS`, whose kind takes that many tokens.
            input_ids: [1, Q] int64.
            position_ids: [1, S] int64; only its length counts: S tokens after this call, S - Q before it.
            states: in the order of the manifest, written in place.

        Returns:
            Logits float32, [1, vocab] of the last token or [1, Q, vocab] of all, in memory that no later call writes.
        """
        ...


@dataclass(frozen=True)
class Built:
    """The result of a back end: the program as the manifest describes it, and the graph checks it passed."""

    program: ProgramSpec
    checks: tuple[CheckResult, ...]


def program_spec(
    traits: FormatTraits, options: FormatOptions, recipe: Recipe, states: tuple[StateSpec, ...],
    methods: Mapping[str, MethodSpec], *, runtime: str, operators: Iterable[str],
) -> ProgramSpec:  # fmt: skip
    """What a manifest says of a program that was just built; `operators` in any order."""
    return ProgramSpec(
        format=traits.name,
        file=traits.file,
        options=options.model_dump(mode="json"),
        weights=options.described(recipe),
        recipe=recipe,
        layout=traits.layout,
        max_kl_divergence=options.ceiling(state.dtype for state in states),
        states=states,
        methods=dict(methods),
        runtime=runtime,
        operators=tuple(sorted(operators)),
    )


class BuildModule(Protocol):
    """``exporter.backends.<format>.build``."""

    def kernels(self, options: Any) -> CacheKernels:
        """The cache implementation that a decoder for this format is built on; `options` as `build` takes them."""
        ...

    def build(
        self, decoder: Decoder, limits: Limits, options: Any, recipe: Recipe, *, directory: Path, step: Step
    ) -> Built:
        """Write the program of `decoder` under `directory` and check it.

        Args:
            decoder: the model over `kernels` and the states of this format's layout: rounded as `recipe` says where
                the traits say `decoder_is_rounded`, else the float32 one. It may be changed in place.
            limits: the maxima its methods declare.
            options: the format's section of the config.
            recipe: how the program keeps its weights: what `options` come to for this model.
            directory: the staged bundle.
            step: reports a step of the work.

        Raises:
            GraphContractError: a check failed.
            UserError: the format cannot carry the model or an option, or its packages are not installed.
        """
        ...

    def beside(self, manifest: Manifest) -> dict[str, str]:
        """The format's text files in the bundle beside its program, by name.

        Args:
            manifest: the bundle's, with this format's program alone.
        """
        ...


class FileModule(Protocol):
    """``exporter.backends.<format>.file``."""

    def read_file(self, path: Path) -> Any:
        """The program at `path`, for `check_file` and `describe`. Raises BundleError when it cannot be read."""
        ...


class DescriptionModule(Protocol):
    """``exporter.backends.<format>.description``."""

    def describe(self, file: Any) -> FileDescription:
        """What a program says of itself."""
        ...


class ChecksModule(Protocol):
    """``exporter.backends.<format>.checks``."""

    def check_file(
        self, file: Any, contracts: Sequence[ProgramContract], demands: ContractFile, recorded: ProgramSpec | None
    ) -> list[CheckResult]:
        """The graph checks on a program.

        Args:
            file: of `read_file`.
            contracts: one a method.
            demands: the user's limits; those that are not among the traits' `limits` are not read.
            recorded: the program as a manifest describes it; None for a file alone, or where the user's demands
                replace it.

        Raises:
            BundleError: a part that is read only now is damaged.
            GraphContractError: its methods and inputs are others.
        """
        ...


class RuntimeModule(Protocol):
    """``exporter.backends.<format>.runtime``; imports leaf modules of the exporter only."""

    def prepare(self, threads: int | None) -> int | None:
        """Import all that a program needs, and let it compute with `threads` threads, by default as many as it
        chooses. Memory resident afterwards is that of the bare process. Returns the number of threads for torch; None
        leaves it unchanged.

        Raises:
            MissingPackageError: the packages of the format are not installed.
        """
        ...

    def load(self, path: Path, program: ProgramSpec) -> Program:
        """The program at `path`, ready to run.

        Raises:
            BundleError: the runtime refuses the file, or it is not the one that `program` describes.
            MissingPackageError: the packages of the format are not installed.
        """
        ...
