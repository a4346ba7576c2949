"""Exported programs against eager, to the bit (but see `agree`); eager in any split against an uncached oracle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import oracle_logits
from tiny_models import (
    GLOBAL,
    KERNELS,
    SLIDING,
    SPECS,
    CacheDType,
    agree,
    attention,
    call,
    decoder_of,
    model,
    one_thread,  # noqa: F401
    play,
    states_of,
    token_ids,
)

from exporter.graph import ProgramContract, check_exported, refuse_failed
from exporter.model.decoder import Decoder, parameter_shapes
from exporter.programs import Limits, method_spec, trace
from exporter.spec import PROGRAMS, ModelSpec

NAN = float("nan")
LENGTH = 60
RELATIVE = 6e-6  # of the largest logit: float32 through a few layers, whichever BLAS
SPLITS = (
    [LENGTH],
    [1] * LENGTH,
    [5, 7, 1, 20, 1, 1, 9, 8, 2, 6],
    [2, 3, 40, 1, 14],
    [8, 8, 8, 1, 16, 19],
)


_decoders: dict[tuple[str, str, int], Decoder] = {}
_expected: dict[str, torch.Tensor] = {}


def cached(name: str, kernels: str = "plain", slack: int = 0) -> Decoder:
    key = (name, kernels, slack)
    if key not in _decoders:
        _decoders[key] = decoder_of(SPECS[name], kernels=kernels, slack=slack)
    return _decoders[key]


def expected_logits(name: str) -> torch.Tensor:
    if name not in _expected:
        _expected[name] = oracle_logits(SPECS[name], dict(cached(name).named_parameters()), token_ids(LENGTH))
    return _expected[name]


def assert_logits(got: dict[int, torch.Tensor], expected: torch.Tensor) -> None:
    rows = torch.stack(list(got.values())).double()
    difference = (rows - expected[list(got)]).abs().max()
    assert difference <= RELATIVE * expected.abs().max(), float(difference / expected.abs().max())


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("slack", [0, 3])
@pytest.mark.parametrize("name", SPECS)
def test_any_split_equals_the_uncached_oracle(name: str, slack: int, kernels: str) -> None:
    decoder, ids = cached(name, kernels, slack), token_ids(LENGTH)
    for splits in SPLITS:
        assert_logits(play(decoder, ids, splits, states_of(decoder, NAN)), expected_logits(name))


@settings(deadline=None, max_examples=12, derandomize=True)
@given(
    name=st.sampled_from(sorted(SPECS)),
    kernels=st.sampled_from(KERNELS),
    slack=st.integers(0, 9),
    splits=st.lists(st.integers(1, 25), min_size=1, max_size=6).filter(lambda splits: sum(splits) <= LENGTH),
)
def test_random_splits_equal_the_uncached_oracle(name: str, kernels: str, slack: int, splits: list[int]) -> None:
    decoder = cached(name, kernels, slack)
    ids = token_ids(LENGTH)[: sum(splits)]
    assert_logits(play(decoder, ids, splits, states_of(decoder, NAN)), expected_logits(name))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", SPECS)
def test_a_second_conversation_over_the_same_tensors_is_as_a_first(name: str, kernels: str) -> None:
    decoder = cached(name, kernels, 3)
    states, ids = states_of(decoder), token_ids(30, seed=2)
    play(decoder, token_ids(LENGTH), [40, *[1] * 20], states)
    for splits in ([20, 1, 1, 8], [1, 1, 28]):
        again, fresh = play(decoder, ids, splits, states), play(decoder, ids, splits, states_of(decoder))
        assert list(again) == list(fresh)
        for position, logits in fresh.items():
            if kernels == "plain":
                assert torch.equal(again[position], logits)
            else:
                torch.testing.assert_close(again[position], logits, rtol=0, atol=RELATIVE * float(logits.abs().max()))


def test_one_token_may_also_go_through_prefills_path() -> None:
    decoder, ids = cached("config T"), token_ids(20)
    states = states_of(decoder, NAN)
    logits = {i: call(decoder, [token], i, states, False) for i, token in enumerate(ids)}
    assert_logits(logits, expected_logits("config T"))


def last_logits(decoder: Decoder, ids: Sequence[int]) -> torch.Tensor:
    return play(decoder, ids, [4, 1, len(ids) - 6, 1], states_of(decoder))[len(ids) - 1]


def test_a_window_counts_the_current_token() -> None:
    """One layer: a change at distance W - 1 reaches the logits, at distance W it does not."""
    decoder = decoder_of(model(attention(8)))
    ids = token_ids(30)
    reference = last_logits(decoder, ids)
    for distance, matters in ((7, True), (8, False), (9, False), (29, False)):
        changed = list(ids)
        changed[29 - distance] = (changed[29 - distance] + 1) % 97
        assert bool((last_logits(decoder, changed) != reference).any()) == matters, distance


def test_global_layers_of_a_mixed_model_remember_the_first_token() -> None:
    ids = token_ids(60)
    changed = [(ids[0] + 1) % 97, *ids[1:]]
    for spec, remembers in ((model(SLIDING, GLOBAL), True), (model(SLIDING, SLIDING), False)):
        decoder = decoder_of(spec)
        assert bool((last_logits(decoder, changed) != last_logits(decoder, ids)).any()) == remembers


@pytest.mark.parametrize("kernels", KERNELS)
def test_rows_beyond_the_conversation_do_not_change_it(kernels: str) -> None:
    """A global layer's tensor may be grown at any time."""
    decoder, ids = cached("config T", kernels), token_ids(30)
    outputs = [play(decoder, ids, [20, 1, 8, 1], states_of(decoder, NAN, rows=rows)) for rows in (30, 31, 64, 192)]
    for other in outputs[1:]:
        for position, logits in outputs[0].items():
            torch.testing.assert_close(other[position], logits, rtol=0, atol=RELATIVE * float(logits.abs().max()))


@pytest.mark.parametrize("kernels", KERNELS)
def test_write_first_refuses_a_chunk_on_sliding_layers(kernels: str) -> None:
    decoder = cached("config T", kernels)
    with pytest.raises(ValueError, match=r"got query_len 3; expected 1.*`prefill`"):
        call(decoder, [1, 2, 3], 0, states_of(decoder), True)


def test_both_kernels_share_one_set_of_weights() -> None:
    decoder = cached("sinks and experts")
    twin = decoder.with_kernels(cached("sinks and experts", "executorch").layers[0].mixer.kernels)
    assert decoder.layers[0].mixer.kernels.name == "plain" and twin.layers[0].mixer.kernels.name == "executorch"
    own = dict(decoder.named_parameters())
    assert all(parameter is own[name] for name, parameter in twin.named_parameters())
    assert set(own) == set(parameter_shapes(SPECS["sinks and experts"]))
    ids = token_ids(LENGTH)
    assert_logits(play(twin, ids, SPLITS[2], states_of(twin)), expected_logits("sinks and experts"))


LIMITS = Limits(max_context_length=192, max_prefill_chunk=64)
# Every length of interest, over four wraps and more, then single tokens across the ring's end, then the maximum.
CALLS = [7, 1, 8, 2, 9, 1, 1, 20, 1, 40, *[1] * 10, 64]
EXPORTS: list[tuple[ModelSpec, int, CacheDType]] = [
    (model(SLIDING, GLOBAL), 0, "float32"),
    (SPECS["sinks and experts"], 3, "float32"),
    (model(SPECS["short convolution"].layers[2].mixer, attention(8, logit_softcap=2.0), GLOBAL), 0, "float32"),
    (model(SLIDING, GLOBAL), 0, "int8"),
    (model(SPECS["short convolution"].layers[2].mixer, attention(8, sinks=True), GLOBAL), 3, "int8"),
]


class Programs:
    """Both exported methods of a decoder and the decoder itself."""

    def __init__(self, spec: ModelSpec, slack: int, dtype: CacheDType, kernels: str) -> None:
        self.kernels, self.decoder = kernels, decoder_of(spec, kernels=kernels, slack=slack, dtype=dtype)
        self.exported = {name: trace(self.decoder, kind, LIMITS) for name, kind in PROGRAMS.items()}
        self.modules: dict[str, Any] = {method: program.module() for method, program in self.exported.items()}


@pytest.fixture(
    scope="module",
    params=[(index, kernels) for index in range(len(EXPORTS)) for kernels in KERNELS],
    ids=lambda param: f"{('mixed', 'experts and slack', 'convolution', 'int8', 'int8 slack')[param[0]]}, {param[1]}",
)
def programs(request: pytest.FixtureRequest) -> Iterator[Programs]:
    index, kernels = request.param
    return Programs(*EXPORTS[index], kernels)


def assert_equal_call(programs: Programs, chunk: Sequence[int], offset: int, states: list[torch.Tensor]) -> None:
    """One call of the program and of eager over the same states, which eager's result then replaces."""
    method = "main" if len(chunk) == 1 else "prefill"
    own = [state.clone() for state in states]
    theirs = call(programs.decoder, chunk, offset, states, method == "main")
    ours = call(programs.modules[method], chunk, offset, own)
    exactly = programs.kernels == "plain" or method == "main"
    assert torch.isfinite(ours).all() and agree([ours], [theirs], exactly=exactly), (offset, len(chunk))
    assert agree(own, states, exactly=exactly), (offset, len(chunk))


def test_exported_programs_equal_eager_on_logits_and_on_every_byte_of_state(programs: Programs) -> None:
    ids, states, offset = token_ids(sum(CALLS)), states_of(programs.decoder, NAN), 0
    for length in CALLS:
        assert_equal_call(programs, ids[offset : offset + length], offset, states)
        offset += length


@pytest.mark.parametrize("rows", [2, 7, 64, 191])
def test_exported_programs_take_any_number_of_global_rows(programs: Programs, rows: int) -> None:
    ids, states, offset = token_ids(rows), states_of(programs.decoder, NAN, rows=rows), 0
    for length in [1, 1] if rows == 2 else [min(rows - 1, 64), 1]:
        assert_equal_call(programs, ids[offset : offset + length], offset, states)
        offset += length


def test_an_interface_declares_what_the_program_takes(programs: Programs) -> None:
    for method in PROGRAMS:
        spec = method_spec(programs.decoder, PROGRAMS[method], LIMITS)
        assert spec.dims["seq_len"] == ((1, 192) if method == "main" else (2, 192))
        assert spec.dims.get("query_len") == (None if method == "main" else (2, 64))
        states = [state.name for state in programs.decoder.states]
        assert [tensor.name for tensor in spec.inputs] == ["input_ids", "position_ids", *states]
        assert list(spec.mutates) == states and spec.outputs[0].shape == (1, 97)
        signature = programs.exported[method].graph_signature
        assert len(signature.user_outputs) == 1 and not signature.buffers_to_mutate


def test_an_exported_program_refuses_what_it_does_not_declare(programs: Programs) -> None:
    states = states_of(programs.decoder)
    for method, length in (("prefill", 65), ("main", 2)):
        with pytest.raises(AssertionError, match="Guard failed: input_ids"):
            call(programs.modules[method], token_ids(length), 0, states)


@pytest.mark.parametrize(("context", "chunk"), [(2, 8), (3, 2), (8, 64), (9, 4)])
def test_the_smallest_contexts_and_chunks_can_be_traced(context: int, chunk: int) -> None:
    decoder, ids = decoder_of(model(SLIDING, GLOBAL), context=context), token_ids(context)
    limits = Limits(max_context_length=context, max_prefill_chunk=chunk)
    expected = oracle_logits(decoder.spec, dict(decoder.named_parameters()), ids)
    programs = {name: trace(decoder, kind, limits) for name, kind in PROGRAMS.items()}
    for method, program in programs.items():  # a Q fixed at 2 equals the number of KV heads here
        interface = method_spec(decoder, PROGRAMS[method], limits)
        contract = ProgramContract(method=method, interface=interface, states=decoder.states)
        refuse_failed(check_exported(program, contract))
    prefill, main = (program.module() for program in programs.values())
    states, length = states_of(decoder, NAN), min(chunk, context)
    assert_logits({length - 1: call(prefill, ids[:length], 0, states)}, expected)
    states = states_of(decoder, NAN)
    assert_logits({i: call(main, [token], i, states) for i, token in enumerate(ids)}, expected)
