"""Run the program that ships and compare it with the model it came from.

Letters: V vocab_size, n compared positions. With `exporter.runs` the only part of the exporter that runs bundles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from exporter.backends import Effort, traits
from exporter.bundle import Bundle
from exporter.config import ExportConfig
from exporter.english import english_ids
from exporter.errors import BundleError, VerificationError
from exporter.progress import Detail
from exporter.reference import TransformersReference
from exporter.runs import Calls, Run, run
from exporter.spec import EAGER, FLOAT, Comparison, Manifest, SourceSpec, StateSpec
from runtime_ref.programs import load_program
from runtime_ref.session import Session
from runtime_ref.state import State

REFERENCE_FILE = "reference.safetensors"
TOP = 64


FLOAT_MAX, FLOAT_MEAN = 1e-2, 1e-3
SLACK, HALF = 0.02, 1e-3
"""Mean KL divergence, in nats, that is never too much: of a program that rounds from the float model, and of float16
arithmetic from float32 (measured: 1.2e-5 on Gemma 3 270M)."""
RECORDED, BASELINE, TRANSFORMERS = "float eager, as recorded", "(eager against float eager)", "transformers"


class Differences:
    """Collects logit rows ``[V]`` of a program of `format` and of what it is held against, at the same positions."""

    def __init__(self, reference: str, format: str) -> None:
        self.reference, self.format = reference, format
        self.largest = self.total = self.divergence = 0.0
        self.count = self.values = self.agreed = 0

    def add(self, got: torch.Tensor, want: torch.Tensor) -> None:
        difference = (got - want).abs()
        self.largest = max(self.largest, float(difference.max()))
        self.total += float(difference.sum(dtype=torch.float64))
        self.count, self.values = self.count + 1, self.values + difference.numel()
        self.agreed += int(got.argmax() == want.argmax())
        logp, logq = torch.log_softmax(want.double(), -1), torch.log_softmax(got.double(), -1)
        self.divergence += float((logp.exp() * (logp - logq)).sum())
        if not bool(torch.isfinite(got).all()):
            self.largest = float("inf")

    def comparison(self, **more: object) -> Comparison:
        """The summary; `more` fills the optional fields of `Comparison`."""
        return Comparison(
            format=self.format,
            reference=self.reference,
            positions=self.count,
            max_abs_difference=min(self.largest, torch.finfo(torch.float32).max),
            mean_abs_difference=self.total / max(self.values, 1),
            mean_kl_divergence=max(self.divergence / max(self.count, 1), 0.0),
            argmax_agreement=self.agreed / max(self.count, 1),
            **more,  # type: ignore[arg-type]
        )


def compare(name: str, got: Run, want: Run, states: bool = True) -> Comparison:
    """Two runs of the same calls: the logits of each, and every row of state in use at the end unless their `states`
    are in different units."""
    differences = Differences(name, got.state.manifest.program.format)
    for ours, theirs in zip(got.logits, want.logits, strict=True):
        differences.add(ours, theirs)
    return differences.comparison(max_state_difference=state_difference(got.state, want.state) if states else None)


def compare_with_eager(program: Run, eager: Run, original: Run) -> list[Comparison]:
    """The program against the eager model it was traced from; if that one is quantised, both against the float one.

    Args:
        program: of the program that ships.
        eager: of the decoder it was traced from, on plain caches.
        original: of the decoder before quantisation on float32 caches; `eager` itself when nothing was quantised.
    """
    comparisons = [compare(EAGER, program, eager)]
    if original is not eager:
        # A smoothed model keeps values divided by its factors.
        manifest = program.state.manifest
        states = not manifest.program.scaled_states
        comparisons += [compare(FLOAT, program, original, states), compare(BASELINE, eager, original, states)]
    return comparisons


def state_difference(state: State, reference: State) -> float:
    """The largest difference over every row of state that holds a token, integers taken for what they stand for;
    infinite when one is no number."""
    largest = 0.0
    theirs = dict(float_states(reference))
    for spec, ours in float_states(state):
        other = theirs[spec]
        rows = min(spec.cache_kind.kept_rows(spec, state.length), ours.shape[1], other.shape[1])
        difference = (ours[:, :rows] - other[:, :rows]).abs()
        largest = max(largest, float(difference.nan_to_num(nan=torch.inf).max()))
    return min(largest, torch.finfo(torch.float32).max)  # JSON has no infinity


def float_states(state: State) -> Iterator[tuple[StateSpec, torch.Tensor]]:
    """Every state but the scales, as floats: described as it would be in a float32 cache, and its rows."""
    tensors = {spec.name: tensor for spec, tensor in zip(state.manifest.states, state.tensors, strict=True)}
    for spec in state.manifest.with_float_caches().states:
        own = next(one for one in state.manifest.states if one.name == spec.name)
        rows = tensors[spec.name]
        yield spec, rows if own.scales is None else rows * tensors[own.scales]


def compare_with_transformers(
    session: Session, reference: TransformersReference, ids: Sequence[int], effort: Effort, detail: Detail
) -> list[Comparison]:
    """For each chunk length: the prompt's logits at every call, then greedy tokens of the reference one by one."""
    detail("reference logits")
    rows = reference.logits(ids)
    tokens, greedy_rows = reference.greedy(ids, effort.greedy)
    first = len(ids) - effort.tail - 1 if effort.tail else 0  # the first position whose next token counts
    targets = torch.tensor(list(ids[first + 1 :]))
    reference_nll = float(torch.nn.functional.cross_entropy(rows[first:-1].double(), targets))
    comparisons = []
    for chunk in sorted({min(chunk, session.manifest.max_prefill_chunk) for chunk in effort.chunks}):
        detail(f"chunks of {chunk}")
        differences = Differences(f"{TRANSFORMERS}, chunks of {chunk}", session.manifest.program.format)
        losses: list[float] = []
        session.reset()

        def observe(position: int, logits: torch.Tensor, differences: Differences = differences) -> None:
            if position >= len(ids):
                return
            differences.add(logits, rows[position])
            if first <= position < len(ids) - 1:
                losses.append(-float(torch.log_softmax(logits.double(), -1)[ids[position + 1]]))  # noqa: B023

        session.observer = observe
        logits = session.prefill(ids[: len(ids) - effort.tail], chunk)
        for token in ids[len(ids) - effort.tail :]:
            logits = session.decode(token)
        agreed = 0
        for token, want in zip(tokens, greedy_rows, strict=True):
            agreed += int(logits.argmax()) == token
            logits = session.decode(token)
            differences.add(logits, want)
        session.observer = None
        nll = {}
        if chunk == 1 or effort.tail:
            assert len(losses) == len(targets)
            nll = {"nll": sum(losses) / len(losses), "reference_nll": reference_nll}
        comparisons.append(differences.comparison(greedy_agreement=f"{agreed} of {effort.greedy}", **nll))
    return comparisons


def write_reference(path: Path, original: Run, calls: Calls) -> None:
    """Keep what the float model said, so that the file can be verified where there is no checkpoint.

    ``ids [N]``, ``pieces [n]`` (the calls), ``top_ids [n, 64]``, and ``logprobs [n, 65]``: of those ids, then of all
    the others together.
    """
    logits = torch.stack(original.logits)
    top_ids = logits.topk(min(TOP, logits.shape[1] - 1)).indices
    save_file(
        {
            "ids": torch.tensor(calls.ids[: sum(calls.pieces)]),
            "pieces": torch.tensor(calls.pieces),
            "top_ids": top_ids.contiguous(),
            "logprobs": torch.stack([_summary(row, top) for row, top in zip(logits, top_ids, strict=True)]),
        },
        path,
    )


def _summary(logits: torch.Tensor, top_ids: torch.Tensor) -> torch.Tensor:
    """Logits ``[V]`` to float32 log probabilities ``[65]``: of `top_ids`, then of everything else together."""
    logprobs = torch.log_softmax(logits.double(), -1)
    rest = logprobs.exp().index_fill(0, top_ids, 0.0).sum().clamp(min=1e-30).log()
    return torch.cat([logprobs[top_ids], rest[None]]).float()


def compare_with_recorded(session: Session, path: Path) -> Comparison:
    """Compare with what the float model said at export, as log probabilities."""
    recorded = load_file(path)
    differences = Differences(RECORDED, session.manifest.program.format)
    rows = run(session, Calls(recorded["ids"].tolist(), recorded["pieces"].tolist())).logits
    for logits, top_ids, logprobs in zip(rows, recorded["top_ids"], recorded["logprobs"], strict=True):
        differences.add(_summary(logits, top_ids), logprobs)
    return differences.comparison()


def check_same_source(manifest: Manifest, source: SourceSpec, config: ExportConfig) -> None:
    """Refuse to compare a bundle with weights it does not come from.

    Raises:
        BundleError: other files, or other quantisation of weights or caches, than the manifest records.
    """
    asked: list[tuple[str, object, object]] = [
        ("checkpoint files", source.files, manifest.source.files),
        ("cache.dtype", config.cache.caches, manifest.cache.caches),
    ]
    for program in manifest.programs:
        options = config.options(program.format).model_dump(mode="json")
        asked += [(f"{program.format}.{key}", options[key], value) for key, value in program.options.items()]
    for what, got, want in asked:
        if got != want:
            raise BundleError(
                f"bundle {manifest.name}",
                got=f"{what} {got} in the config",
                expected=f"{want}, as the manifest records",
                repair="Give the config this bundle was exported with.",
            )


def judge(comparisons: Sequence[Comparison], manifest: Manifest, baseline: float) -> None:
    """Refuse a program that is not the model it claims to be.

    Float programs: logits within `FLOAT_MAX`, and `FLOAT_MEAN` on average. A quantised program rounds at run time,
    activations or the rows of its caches, and where two implementations round a borderline value apart, all that
    follows differs by as much as rounding itself does. So it is held to the distribution: its mean KL divergence from
    the float model is at most twice `baseline`, that of its own eager model, plus `SLACK`. In the other formats
    activations are floats, and the program is held to its eager model as well: at most twice `baseline` (the grids of
    the converters are not quite ours) plus `HALF` apart.

    Raises:
        VerificationError: which comparison failed, and by how much.
    """
    for c in comparisons:
        if not manifest.is_quantized:
            bad = not (c.max_abs_difference <= FLOAT_MAX and c.mean_abs_difference <= FLOAT_MEAN)
            expected = f"max |difference| <= {FLOAT_MAX} and mean <= {FLOAT_MEAN}"
        else:
            from_float = c.reference in {FLOAT, RECORDED} or c.reference.startswith(TRANSFORMERS)
            if not from_float and (c.reference != EAGER or traits(c.format).decoder_is_rounded):
                continue
            limit = 2 * baseline + (SLACK if from_float else HALF)
            bad = not c.mean_kl_divergence <= limit
            expected = f"mean KL divergence <= {limit:.3g}"
        if bad:
            raise VerificationError(
                f"verification against {c.reference}",
                got=f"max |difference| {c.max_abs_difference:.3g}, mean {c.mean_abs_difference:.3g}, "
                f"mean KL divergence {c.mean_kl_divergence:.3g} over {c.positions} positions",
                expected=expected,
                repair="The program does not compute the model it came from; do not ship it.",
            )


def baseline_divergence(comparisons: Sequence[Comparison]) -> float:
    """The KL divergence that quantisation alone costs, measured in eager; 0 for a float program."""
    return next((c.mean_kl_divergence for c in comparisons if c.reference == BASELINE), 0.0)


def open_session(bundle: Bundle) -> Session:
    return Session(bundle.manifest, load_program(bundle))


def bundle_ids(bundle: Bundle, count: int) -> list[int]:
    """English token ids for a bundle, by its own tokenizer."""
    return english_ids(bundle.path / "tokenizer" / "tokenizer.json", bundle.manifest.tokenizer, count)
