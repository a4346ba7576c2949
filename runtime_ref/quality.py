"""A bundle's next-token predictions on many kinds of text, beside those of a reference.

Letters: V vocab_size, n scored positions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from exporter.bundle import Bundle, read_bundle
from exporter.errors import BundleError, ConfigError
from exporter.quality.domains import DOMAINS, Domain, Passage, passages_of
from exporter.quality.scores import DomainScores
from exporter.quiet import quieten_libraries
from exporter.spec import DomainScore
from exporter.text.encoder import Encoder
from runtime_ref.programs import choose, load_program
from runtime_ref.session import Session

ROWS = 64
"""Of logits at a time: one may be a megabyte."""


class Reference(Protocol):
    """Another model of the same vocabulary."""

    vocab_size: int

    def logits(self, passage: Passage) -> Iterator[torch.Tensor]:
        """Float logits ``[n, V]`` of the scored positions, a few rows at a time."""
        ...


def passage_logits(session: Session, passage: Passage) -> Iterator[torch.Tensor]:
    """Logits ``[V]`` of every scored position, from an empty session: the first tokens together, then one by one."""
    session.reset()
    yield session.prefill(passage.ids[: passage.first])
    for token in passage.ids[passage.first : -1]:
        yield session.decode(token)


class BundleReference:
    """The program of a bundle; that of one exported without quantisation says what the float model says."""

    def __init__(self, bundle: Bundle) -> None:
        self._session = Session(bundle.manifest, load_program(bundle))
        self.vocab_size = bundle.manifest.model.vocab_size

    def logits(self, passage: Passage) -> Iterator[torch.Tensor]:
        """See `Reference`."""
        return (row[None] for row in passage_logits(self._session, passage))


class TransformersReference:
    """A Hugging Face directory or a GGUF file through Transformers, in float32."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError: Transformers cannot load it."""
        quieten_libraries()
        import transformers

        how: dict[str, Any] = {"gguf_file": path.name} if path.is_file() else {"use_safetensors": True}
        directory = path.parent if path.is_file() else path
        try:
            self._model = transformers.AutoModelForCausalLM.from_pretrained(
                str(directory), local_files_only=True, dtype=torch.float32, **how
            ).eval()
        except Exception as error:  # of many kinds
            raise ConfigError(
                f"--reference {path.name}",
                got=" ".join(f"{error}".split())[:200],
                expected="a bundle, a Hugging Face directory or a GGUF file that Transformers loads",
                repair="Name the checkpoint that the bundle came from, or a bundle exported without quantisation.",
            ) from error
        self.vocab_size = int(self._model.config.get_text_config().vocab_size)

    @torch.no_grad()
    def logits(self, passage: Passage) -> Iterator[torch.Tensor]:
        """See `Reference`."""
        hidden = self._model.base_model(torch.tensor([passage.ids[:-1]]), use_cache=False)
        cap = getattr(self._model.config.get_text_config(), "final_logit_softcapping", None)
        for rows in hidden.last_hidden_state[0, passage.first - 1 :].split(ROWS):
            logits = self._model.lm_head(rows)
            yield torch.tanh(logits / cap) * cap if cap else logits


def open_reference(path: Path) -> Reference:
    """What is at `path`: a bundle, a Hugging Face directory or a GGUF file.

    Raises:
        BundleError: a bundle that cannot be read.
        ConfigError: Transformers cannot load what is there.
    """
    if os.path.isfile(path / "manifest.json"):
        return BundleReference(choose(read_bundle(path), None))
    return TransformersReference(path)


def chosen_domains(names: str | None) -> tuple[Domain, ...]:
    """Those of a list with commas, all without one.

    Raises:
        ConfigError: an unknown name.
    """
    if names is None:
        return DOMAINS
    known = {domain.name: domain for domain in DOMAINS}
    wanted = [name.strip() for name in names.split(";")]
    if unknown := [name for name in wanted if name not in known]:
        raise ConfigError(
            "--domains", got=", ".join(map(repr, unknown)), expected=f"some of {'; '.join(known)}",
            repair="Write them with semicolons.",
        )  # fmt: skip
    return tuple(known[name] for name in wanted)


def quality(
    bundle: Bundle, reference: Reference, domains: Sequence[Domain], positions: int,
    watch: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> Iterator[DomainScore]:  # fmt: skip
    """The scores of the one program of `bundle`, each domain's when it is done. A domain of which the context leaves
    fewer than two positions is left out.

    Args:
        bundle: the bundle, with the manifest of one format.
        reference: says what the float model says.
        domains: which.
        positions: at most, in each.
        watch: is told the domain, how many positions are done, and of how many.

    Raises:
        BundleError: the reference has another vocabulary.
    """
    manifest = bundle.manifest
    if reference.vocab_size != manifest.model.vocab_size:
        raise BundleError(
            f"bundle {manifest.name}",
            got=f"a reference with a vocabulary of {reference.vocab_size}",
            expected=f"the same model's, {manifest.model.vocab_size}",
            repair="Name the checkpoint that the bundle came from.",
        )
    encoder = Encoder(bundle.path / "tokenizer", manifest.tokenizer)
    session = Session(manifest, load_program(bundle))
    for domain in domains:
        passages = passages_of(domain, encoder, positions, manifest.max_context_length)
        total = sum(one.positions for one in passages)
        if total < 2:
            continue
        scores, done = DomainScores(domain.name), 0
        for passage in passages:
            wanted = (want for rows in reference.logits(passage) for want in rows)
            followings = passage.ids[passage.first :]
            for want, got, following in zip(wanted, passage_logits(session, passage), followings, strict=True):
                scores.add(want[None], got[None], torch.tensor([following]))
                done += 1
                watch(domain.name, done, total)
        yield scores.score()
