"""Each property of a saved Core AI function, held against a function that lacks it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
import torch
from coreai_models import LIMITS, stacked_states
from recipes import recipe_of
from tiny_models import one_thread  # noqa: F401

from exporter import programs
from exporter.backends.coreai.bytecode import stored_blobs
from exporter.backends.coreai.checks import check_function, weights_stored_once
from exporter.backends.coreai.convert import convert
from exporter.backends.coreai.file import Asset, Function
from exporter.backends.coreai.options import CoreAIOptions
from exporter.cache import masks, plain
from exporter.cache.interface import States
from exporter.graph import ProgramContract
from exporter.model.convolution import ShortConv
from exporter.model.decoder import Decoder
from exporter.model.parts import Call, Part
from exporter.programs import ProgramModule, method_spec, trace
from exporter.spec import PROGRAMS, ShortConvSpec

SPEC = tiny_models.model(tiny_models.attention(4), tiny_models.attention(4), tiny_models.GLOBAL)
CONVOLUTIONS = tiny_models.model(tiny_models.CONV, tiny_models.attention(4), tiny_models.CONV)


class FaultyRing(plain.RingKVCache):
    """A ring with one fault; `index` tells the sliding layers apart."""

    fault, index = "", 0

    def fetch_and_concat(self, chunk: States, offset: int) -> States:
        if self.fault == "prefill writes first":
            self.update(chunk, offset)
        return super().fetch_and_concat(chunk, offset)

    def update(self, chunk: States, offset: int) -> None:
        held = masks.ring_positions(offset + chunk[0].shape[1], self.capacity)
        source = torch.where(held >= offset, held - offset + self.capacity, torch.arange(self.capacity))
        if self.fault == "gathers by data":
            source = source + (chunk[0][0, 0, 0, 0] * 0).to(torch.int64)
        if self.fault == "gathers the wrong rows":
            source = source.flip(0)
        written = self.states[:1] if self.fault == "forgets the second layer's values" and self.index else self.states
        for state, rows in zip(written, chunk, strict=False):
            state.copy_(torch.cat([state, rows], 1).index_select(1, source))

    def update_and_fetch(self, chunk: States, offset: int) -> States:
        if self.fault == "main reads first":
            before = (self.states[0].clone(), self.states[1].clone())
            super().update_and_fetch(chunk, offset)
            return before
        if self.fault == "writes the next slot":
            return super().update_and_fetch(chunk, offset + 1)
        if self.fault == "writes where data says":
            slot = (chunk[0][0, 0, 0, 0] * 0).to(torch.int64)
            here = (torch.arange(self.capacity) == slot).view(1, -1, 1, 1)
            for state, row in zip(self.states, chunk, strict=True):
                state.copy_(torch.where(here, row, state))
            return self.states
        return super().update_and_fetch(chunk, offset)


class FaultyFull(plain.FullKVCache):
    fault = ""

    def update_and_fetch(self, chunk: States, offset: int) -> States:
        if self.fault == "reads the global rows first":
            before = (self.states[0].clone(), self.states[1].clone())
            self.update(chunk, offset)
            return before
        if self.fault == "writes global rows where data says":
            shift = (chunk[0][0, 0, 0, 0] * 0).to(torch.int64)
            here = (torch.arange(self.states[0].shape[1]) - offset == shift).view(1, -1, 1, 1)
            for state, rows in zip(self.states, chunk, strict=True):
                state.copy_(torch.where(here, rows, state))
            return self.states
        return super().update_and_fetch(chunk, offset)


class ForgetfulConv(ShortConv):
    """A convolution that replaces its state before it reads it."""

    def forward(self, normed: torch.Tensor, call: Call, states: list[torch.Tensor]) -> torch.Tensor:
        gate_in, _, x = self.in_proj(normed).chunk(3, dim=-1)
        states[0].copy_(torch.cat([states[0], gate_in * x], 1).narrow(1, call.query_len, self.history))
        return super().forward(normed, call, states)


class FaultyKernels(plain.PlainKernels):
    def __init__(self, fault: str) -> None:
        self.fault, self.rings = fault, 0

    def ring(self, states: Sequence[torch.Tensor], window: int) -> plain.RingKVCache:
        ring = FaultyRing(states, window, self.storage(states))
        ring.fault, ring.index = self.fault, self.rings
        self.rings += 1
        return ring

    def full(self, states: Sequence[torch.Tensor]) -> plain.FullKVCache:
        full = FaultyFull(states, self.storage(states))
        full.fault = self.fault
        return full


class TiedTwice(torch.nn.Module):
    """A head over its own, transposed copy of the embedding."""

    def __init__(self, embedding: torch.Tensor) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(embedding.detach().t().contiguous())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.table


class FaultyProgram(ProgramModule):
    fault = ""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, *states: torch.Tensor) -> torch.Tensor:
        if self.fault == "returns every row of logits":
            hidden = self.decoder.hidden_states(input_ids, position_ids, states, self.kind.write_first)
            return self.decoder.logits(hidden)
        logits = super().forward(input_ids, position_ids, *states)
        if self.fault == "adds a whole stack up":
            logits = logits + states[2].sum() * 0.0
        if self.fault == "copies a whole stack":
            states[2].copy_(torch.cat([states[2][1:], states[2][:1]]) * 1.0)
        if self.fault == "adds infinity":
            logits = torch.where(logits > 1e9, logits, logits + float("inf") * 0)
            logits = torch.maximum(logits, torch.full((1, 1), -torch.inf))
        return logits


def save(method: str, fault: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, ProgramContract]:
    """One function with a fault, as an asset, and the contract it was meant to keep."""
    spec = CONVOLUTIONS if "convolution" in fault else SPEC
    if fault == "replaces a convolution's inputs first":
        monkeypatch.setitem(Part.of, ShortConvSpec, ForgetfulConv)
    decoder = tiny_models.randomize(Decoder(spec, stacked_states(spec), FaultyKernels(fault)))
    if fault == "keeps a second head":
        decoder.lm_head = TiedTwice(decoder.embed_tokens.weight)
    monkeypatch.setattr(FaultyProgram, "fault", fault)
    monkeypatch.setattr(programs, "ProgramModule", FaultyProgram)
    traced = decoder
    if fault == "fixes the rows":
        static = [s.model_copy(update={"static": True, "rows": s.max_rows}) for s in decoder.states]
        traced = tiny_models.randomize(Decoder(SPEC, static, FaultyKernels("")))
    kind = PROGRAMS[method]
    program = convert(
        {method: trace(traced, kind, LIMITS, "int32")},
        {method: method_spec(traced, kind, LIMITS, "int32")},
        recipe_of(traced.spec, CoreAIOptions(weights="float32")),
    )
    program.save_asset(path)
    return path, ProgramContract(method, method_spec(decoder, kind, LIMITS, "int32"), decoder.states)


FAULTS: list[tuple[str, str, set[str]]] = [
    ("prefill", "prefill writes first", {"ring_reads_before_write"}),
    ("main", "main reads first", {"ring_writes_before_read"}),
    ("main", "reads the global rows first", {"full_writes_before_read"}),
    ("prefill", "gathers by data", {"ring_write_index_from_shapes", "writes_land_on_their_rows"}),
    ("prefill", "gathers the wrong rows", {"writes_land_on_their_rows"}),
    ("main", "writes the next slot", {"write_index_is_definition", "writes_land_on_their_rows"}),
    ("main", "writes where data says",
     {"ring_write_index_from_shapes", "write_index_is_definition", "writes_land_on_their_rows"}),
    ("main", "writes global rows where data says",
     {"full_write_index_from_shapes", "write_index_is_definition", "writes_land_on_their_rows"}),
    ("prefill", "replaces a convolution's inputs first", {"conv_reads_before_write"}),
    ("main", "replaces a convolution's inputs first", {"conv_reads_before_write"}),
    ("prefill", "forgets the second layer's values",
     {"ring_write_index_from_shapes", "writes_land_on_their_rows", "ring_reads_before_write",
      "mutated_inputs_exactly_states"}),
    ("main", "adds a whole stack up", {"no_whole_state_copy"}),
    ("main", "copies a whole stack", {"no_whole_state_copy"}),
    ("prefill", "returns every row of logits", {"last_token_logits_only"}),
    ("main", "fixes the rows", {"dynamic_ranges"}),
    ("main", "adds infinity", {"finite_constants"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "fault", "broken"), FAULTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_fault_breaks_its_checks(
    method: str, fault: str, broken: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, contract = save(method, fault, tmp_path / "model.aimodel", monkeypatch)
    results = check_function(Asset(path).functions[method], contract)
    failed = {result.name: result.evidence for result in results if not result.passed}
    assert broken <= set(failed), failed
    assert fault not in ("prefill writes first", "gathers the wrong rows", "adds infinity") or set(failed) == broken


def test_every_check_fails_on_one_of_the_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for method in PROGRAMS:
        path, contract = save(method, "", tmp_path / f"{method}.aimodel", monkeypatch)
        names |= {result.name for result in check_function(Asset(path).functions[method], contract)}
    assert names == set().union(*(broken for _, _, broken in FAULTS))


def test_a_second_head_is_found_though_it_is_transposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, contract = save("main", "keeps a second head", tmp_path / "model.aimodel", monkeypatch)
    result = weights_stored_once(stored_blobs(path / "main.mlirb"), contract)
    assert not result.passed
    assert str(4 * tiny_models.VOCAB * tiny_models.HIDDEN) in result.evidence


def reads_redirected(function: Function) -> Function:
    """Every slice of a state takes the first version of it, whatever was written since."""
    first: dict[int, int] = {}
    versions = {}
    for op in function.operations:
        if op.name == "coreai.read_handle":
            versions[op.results[0]] = first.setdefault(op.operands[0], op.results[0])
    operations = [
        replace(op, operands=tuple(versions.get(v, v) for v in op.operands)) if op.name == "coreai.slice" else op
        for op in function.operations
    ]
    return replace(function, operations=tuple(operations))


@pytest.mark.parametrize("method", ["prefill", "main"])
def test_without_a_fault_every_check_passes(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, contract = save(method, "", tmp_path / "model.aimodel", monkeypatch)
    function = Asset(path).functions[method]
    assert [result for result in check_function(function, contract) if not result.passed] == []
    assert weights_stored_once(stored_blobs(path / "main.mlirb"), contract).passed
    # A value is what it was when it was made: one from before the last write does not have that write.
    failed = [result for result in check_function(reads_redirected(function), contract) if not result.passed]
    assert [result.name for result in failed] == ["no_whole_state_copy"]
    assert "before the last write" in failed[0].evidence
