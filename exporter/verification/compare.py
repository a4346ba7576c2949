"""What the program that ships and the model it came from say of the same calls, side by side.

Letters: V vocab_size, n compared positions.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save

from exporter.spec import EAGER, FLOAT, Comparison
from exporter.verification.runs import Calls, Run, run
from exporter.verification.states import state_errors
from runtime_ref.session import Session

REFERENCE_FILE = "reference.safetensors"
TOP = 64
RECORDED, BASELINE, TRANSFORMERS = "float eager, as recorded", "(eager against float eager)", "transformers"
LAYERS = "(eager's layers under the float head)"


class Differences:
    """Collects logit rows ``[V]`` of a program of `format`, or without one of the float model, and of what it is held
    against, at the same positions."""

    def __init__(self, reference: str, format: str | None) -> None:
        self.reference, self.format = reference, format
        self.scale = self.largest = self.total = self.divergence = 0.0
        self.count = self.values = self.agreed = 0

    def add(self, got: torch.Tensor, want: torch.Tensor) -> None:
        difference = (got - want).abs()
        self.scale = max(self.scale, float(want.abs().max()))
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
            largest_logit=self.scale,
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
    if not states:
        return differences.comparison()
    errors = state_errors(got.state, want.state)
    return differences.comparison(
        max_state_difference=errors.difference,
        max_state_error=errors.row,
        mean_state_error=errors.mean,
        worst_state=errors.place,
    )


def compare_with_eager(program: Run, eager: Run, original: Run) -> list[Comparison]:
    """The program against the eager model it was traced from; if that one is quantised, both against the float one.

    Args:
        program: of the program that ships.
        eager: of the decoder it was traced from, on plain caches.
        original: of the decoder before quantisation on float32 caches; `eager` itself when nothing was quantised. If it
            had the layers of `eager` beside it, these are compared under the float head too.
    """
    comparisons = [compare(EAGER, program, eager)]
    if original is not eager:
        # A smoothed model keeps values divided by its factors.
        manifest = program.state.manifest
        states = not manifest.program.scaled_states
        comparisons += [compare(FLOAT, program, original, states), compare(BASELINE, eager, original, states)]
        if original.beside is not None:
            comparisons.append(compare(LAYERS, eager._replace(logits=original.beside), original, states=False))
    return comparisons


def write_reference(path: Path, original: Run, calls: Calls) -> None:
    """Keep what the float model said, so that the file can be verified where there is no checkpoint.

    ``ids [N]``, ``pieces [n]`` (the calls), ``top_ids [n, 64]``, and ``logprobs [n, 65]``: of those ids, then of all
    the others together.
    """
    logits = torch.stack(original.logits)
    top_ids = logits.topk(min(TOP, logits.shape[1] - 1)).indices
    saved = save(
        {
            "ids": torch.tensor(calls.ids[: sum(calls.pieces)]),
            "pieces": torch.tensor(calls.pieces),
            "top_ids": top_ids.contiguous(),
            "logprobs": torch.stack([_summary(row, top) for row, top in zip(logits, top_ids, strict=True)]),
        }
    )
    path.write_bytes(saved)  # safetensors' own writer says of a full disk what nobody catches


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
