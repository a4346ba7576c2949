"""The lowered program over every shape of ring: against plain eager, and against an oracle without a cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from executorch.runtime import Runtime
from oracle import oracle_logits
from tiny_models import GLOBAL, SLIDING, attention, call, decoder_of, model, one_thread, states_of, token_ids  # noqa: F401
from torch.fx import Graph

from exporter.backends.executorch import lower as lowering
from exporter.backends.executorch.checks import check_lowered, runtime_registry
from exporter.backends.executorch.lower import lower
from exporter.backends.executorch.options import AttentionKernels
from exporter.backends.executorch.runtime import PteProgram
from exporter.cache.plain import PlainKernels
from exporter.graph import ProgramContract, check_exported
from exporter.model.decoder import Decoder
from exporter.programs import Limits, method_spec, trace
from exporter.spec import PREFILL, PROGRAMS

CONTEXT, CHUNK = 160, 64
RELATIVE = 6e-6  # of the largest logit: float32 through two layers
# Every length of interest, first at a ring's start and then straddling its end, and single tokens between.
SPLITS = ([2, 7, 8, 9, 63, 1, 64, 1, 1, 4], [1, 64, 63, 9, 8, 7, 2, 1, 5], [1] * CONTEXT)
SHAPES = {
    "capacity is the window, windows of 8 and 1": (model(SLIDING, attention(1), GLOBAL), 0),
    "capacity is twice the window": (model(SLIDING, attention(1), GLOBAL), 8),
    "all sliding, one window above the context": (model(attention(5), attention(CONTEXT + 1)), 0),
}


class Lowered:
    """Both methods in one file, the checks that failed on the way, and the decoder they came from."""

    def __init__(self, decoder: Decoder, folder: Path, kernels: AttentionKernels) -> None:
        limits = Limits(max_context_length=CONTEXT, max_prefill_chunk=CHUNK)
        self.decoder = decoder
        programs = {name: trace(decoder, kind, limits) for name, kind in PROGRAMS.items()}
        contracts = [ProgramContract(n, method_spec(decoder, k, limits), decoder.states) for n, k in PROGRAMS.items()]
        results = [r for contract in contracts for r in check_exported(programs[contract.method], contract)]
        self.file = folder / "model.pte"
        lower(programs, self.file)
        results += check_lowered(self.file.read_bytes(), contracts, runtime_registry()[1])
        self.failed = [result for result in results if result.refused]
        self.program = PteProgram(self.file, kernels)

    def call(self, ids: list[int], offset: int, states: list[torch.Tensor]) -> torch.Tensor:
        method = "main" if len(ids) == 1 else "prefill"
        positions = torch.zeros(1, offset + len(ids), dtype=torch.int64)
        return self.program.run(method, torch.tensor([ids]), positions, states)[0]

    def beside(
        self, plain: Decoder, ids: list[int], splits: list[int], states: list[torch.Tensor], twins: list[torch.Tensor]
    ) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """Each chunk's length, the tokens seen with it, our logits over `states`, and those of `plain` over `twins`."""
        offset = 0
        for length in splits:
            chunk = ids[offset : offset + length]
            eager = call(plain, chunk, offset, twins, length == 1)
            ours = self.call(chunk, offset, states)
            offset += length
            yield length, offset, ours, eager


@pytest.fixture(scope="module", params=[*((shape, "ring") for shape in SHAPES), (next(iter(SHAPES)), "stock")])
def lowered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    shape, kernels = request.param
    spec, slack = SHAPES[shape]
    decoder = decoder_of(spec, kernels="executorch" if kernels == "ring" else kernels, slack=slack, context=CONTEXT)
    return Lowered(decoder, tmp_path_factory.mktemp("pte"), kernels)


def test_every_length_over_every_ring_is_eagers_and_the_oracles(lowered: Lowered) -> None:
    """From a state of NaN, then over what the conversation before left; up to the last token of the context."""
    assert lowered.failed == []
    decoder, ids = lowered.decoder, token_ids(CONTEXT)
    expected = oracle_logits(decoder.spec, dict(decoder.named_parameters()), ids)
    plain = decoder.with_kernels(PlainKernels())
    scale = float(expected.abs().max())
    states = states_of(decoder, torch.nan)
    for splits in SPLITS:
        assert sum(splits) <= CONTEXT
        twins, offset = states_of(decoder), 0
        for length, offset, ours, eager in lowered.beside(plain, ids, splits, states, twins):
            assert (ours.double() - expected[offset - 1]).abs().max() <= RELATIVE * scale, (length, offset)
            assert (ours - eager).abs().max() <= RELATIVE * scale, (length, offset)
        for spec, ours, theirs in zip(decoder.states, states, twins, strict=True):
            rows = min(offset, spec.rows) if spec.kind == "ring" else offset
            bound = RELATIVE * float(theirs.abs().max())
            torch.testing.assert_close(ours[:, :rows], theirs[:, :rows], rtol=0, atol=bound)


def test_the_file_itself_refuses_a_chunk_for_main_and_too_long_a_one_for_prefill(lowered: Lowered) -> None:
    """Below any check of ours: the sizes are in the file."""
    program = Runtime.get().load_program(lowered.file)
    for method, length in (("main", 2), ("prefill", CHUNK + 1)):
        loaded = program.load_method(method)
        assert loaded is not None
        with pytest.raises(RuntimeError):
            loaded.execute([torch.zeros(1, length, dtype=torch.int64), torch.zeros(1, 70, dtype=torch.int64),
                            *states_of(lowered.decoder)])  # fmt: skip


@pytest.mark.parametrize("index", range(4))
def test_a_write_that_lowering_moves_before_a_read_of_int8_rows_fails(
    index: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Any of the four states of a layer. Decoding stands outside the delegates, so that partitioning leaves it in
    order by itself; what keeps it there is the check. A write of what a delegate made of the read cannot be moved."""
    decoder = decoder_of(model(SLIDING), kernels="executorch", dtype="int8", context=CONTEXT)
    limits = Limits(max_context_length=CONTEXT, max_prefill_chunk=CHUNK)
    original, names, bound = lowering._order_writes, [], []

    def one_write_early(graph: Graph) -> None:
        original(graph)
        writes = [node for node in graph.nodes if "update_cache_with_indices" in str(node.target)]
        position = {node: i for i, node in enumerate(graph.nodes)}
        write, inputs = writes[index], [node for node in graph.nodes if node.op == "placeholder"]
        names.append(decoder.states[inputs.index(write.args[1]) - len(inputs)].name)  # states are the last inputs
        read = min((user for user in write.args[1].users if user not in writes), key=position.__getitem__)
        moved, stack = [], [write]
        while stack:
            node = stack.pop()
            if position[node] > position[read] and node not in moved:
                moved.append(node)
                stack += node.all_input_nodes
        if any(read in node.all_input_nodes for node in moved):
            bound.append(names[-1])
            return
        for node in sorted(moved, key=position.__getitem__):
            read.prepend(node)

    monkeypatch.setattr(lowering, "_order_writes", one_write_early)
    path = tmp_path / "model.pte"
    lower({"prefill": trace(decoder, PREFILL, limits)}, path)
    contract = ProgramContract("prefill", method_spec(decoder, PREFILL, limits), decoder.states)
    failed = [
        result for result in check_lowered(path.read_bytes(), [contract], runtime_registry()[1]) if result.refused
    ]
    if bound:
        assert index < 2 and not failed
        return
    assert [result.name for result in failed] == ["ring_reads_before_write"]
    assert len(names) == 1 and f"{names[0]}: " in failed[0].evidence
