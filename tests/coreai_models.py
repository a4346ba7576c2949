"""Tiny decoders over stacked states, built as `.aimodel` and held against themselves in eager."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny_models
import torch
from recipes import recipe_of

pytest.importorskip("coreai_torch")  # whoever imports this is skipped where there is no such package

from exporter.backends import Built
from exporter.backends.coreai.build import build
from exporter.backends.coreai.options import CoreAIOptions
from exporter.backends.coreai.runtime import AimodelProgram
from exporter.cache.plain import PlainKernels
from exporter.model.decoder import Decoder
from exporter.programs import Limits
from exporter.progress import Detail
from exporter.spec import CachePolicy, ModelSpec, StateSpec, state_specs

CONTEXT, CHUNK = 64, 24
LIMITS = Limits(max_context_length=CONTEXT, max_prefill_chunk=CHUNK)


@contextmanager
def silent_step(name: str) -> Iterator[Detail]:
    yield lambda text: None


def stacked_states(spec: ModelSpec, slack: int = 0, context: int = CONTEXT) -> tuple[StateSpec, ...]:
    return state_specs(spec, CachePolicy(ring_slack=slack, initial_rows=16), context, "stacked")


def stacked(spec: ModelSpec, slack: int = 0, context: int = CONTEXT) -> Decoder:
    return tiny_models.randomize(Decoder(spec, stacked_states(spec, slack, context), PlainKernels()))


def build_into(
    decoder: Decoder, directory: Path, weights: str = "float32", limits: Limits = LIMITS, **more: object
) -> Built:
    options = CoreAIOptions.model_validate({"weights": weights, **more})
    recipe = recipe_of(decoder.spec, options)
    return build(decoder, limits, options, recipe, directory=directory, step=silent_step)


class Pair:
    """An asset and its eager decoder, each with states of its own that are filled with NaN and grow as they must."""

    def __init__(self, decoder: Decoder, built: Built, directory: Path) -> None:
        self.decoder, self.length = decoder, 0
        self.program = AimodelProgram(directory / built.program.file, built.program)
        self.states = [[torch.full(s.shape(), torch.nan) for s in decoder.states] for _ in range(2)]

    def call(self, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits ``[V]`` of both after `ids`."""
        self.length += len(ids)
        self._grow()
        tokens, positions = torch.tensor([list(ids)]), torch.arange(self.length)[None]
        ours = self.program.run("main" if len(ids) == 1 else "prefill", tokens, positions, self.states[0])[0]
        return ours, tiny_models.call(self.decoder, ids, self.length - len(ids), self.states[1], len(ids) == 1)

    def _grow(self) -> None:
        for states in self.states:
            for i, spec in enumerate(self.decoder.states):
                rows = states[i].shape[1]
                if spec.grows and rows < self.length:
                    grown = torch.full(spec.shape(min(max(2 * rows, self.length), CONTEXT)), torch.nan)
                    grown[:, :rows] = states[i]
                    states[i] = grown

    def state_differences(self) -> list[float]:
        """The largest difference in each state over the rows that hold a token; NaN where one side has none."""
        found = []
        for spec, ours, theirs in zip(self.decoder.states, *self.states, strict=True):
            rows = slice(None) if spec.kind == "conv" else slice(0, min(self.length, spec.max_rows))
            found.append(float((ours[:, rows] - theirs[:, rows]).abs().max()))
        return found
