"""The three ways in which a program takes its states, and bundles that hold a program a format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import CONV, SLIDING, SPECS, decoder_of, model, play, states_of, token_ids
from toy import toy_bundle, toy_manifest

from exporter.backends import formats, traits
from exporter.bundle import read_bundle
from exporter.config import load_config
from exporter.errors import BundleError, ConfigError
from exporter.model.decoder import Decoder
from exporter.plan import layer_states, plan_context
from exporter.programs import Limits, interface
from exporter.spec import PREFILL, CachePolicy, Layout, Manifest, state_specs
from runtime_ref.programs import choose
from runtime_ref.state import State

CONTEXT = 96
POLICY = CachePolicy(initial_rows=8, ring_slack=3)
SPLITS = [1, 2, 30, 1, 1, 17, 1, 5, 1, 1]
UNLIKE = {"two windows", "short convolution"}  # within one kind


@pytest.mark.parametrize("name", [name for name in SPECS if name not in UNLIKE])
def test_a_decoder_over_stacked_states_is_the_decoder(name: str) -> None:
    """Logits and rows to the bit, over chunks longer than the windows and over many turns of the rings."""
    plain = decoder_of(SPECS[name], context=CONTEXT, slack=3)
    stacked = state_specs(SPECS[name], POLICY, CONTEXT, "stacked")
    decoder = Decoder.from_state_dict(SPECS[name], stacked, None, plain.state_dict())
    apart, together = states_of(plain), states_of(decoder)
    ids = token_ids(sum(SPLITS))
    want, got = play(plain, ids, SPLITS, apart), play(decoder, ids, SPLITS, together)
    assert all(torch.equal(got[position], want[position]) for position in want)
    for own, tensor in zip(plain.states, apart, strict=True):
        stack, place = next(
            (i, s.layers.index(own.layers[0])) for i, s in enumerate(stacked)
            if own.layers[0] in s.layers and s.role == own.role
        )  # fmt: skip
        assert torch.equal(together[stack][place], tensor[0]), own.name


def test_stacks_are_named_and_ordered_by_kind() -> None:
    found = state_specs(SPECS["config T"], POLICY, CONTEXT, "stacked")
    rows = [(s.name, s.layers, s.kind, s.role, s.shape(), s.max_rows, s.grows) for s in found]
    assert rows == [
        ("globalKeyCache", (5,), "full", "keys", (1, 8, 2, 16), 96, True),
        ("globalValueCache", (5,), "full", "values", (1, 8, 2, 16), 96, True),
        ("slidingKeyCache", (0, 1, 2, 3, 4), "ring", "keys", (5, 11, 2, 16), 11, False),
        ("slidingValueCache", (0, 1, 2, 3, 4), "ring", "values", (5, 11, 2, 16), 11, False),
    ]
    conv = state_specs(model(CONV, SLIDING, CONV), POLICY, CONTEXT, "stacked")[-1]
    assert (conv.name, conv.layers, conv.shape()) == ("convInputCache", (0, 2), (2, 2, 64))


def test_layers_unlike_each_other_are_not_stacked() -> None:
    with pytest.raises(ConfigError, match=r"slidingKeyCache: got 8 rows .*; 11 rows .*; expected one float shape"):
        state_specs(SPECS["two windows"], POLICY, CONTEXT, "stacked")
    with pytest.raises(ConfigError, match=r"convInputCache: got 2 rows .*; 3 rows"):
        state_specs(SPECS["short convolution"], POLICY, CONTEXT, "stacked")


def test_static_states_have_all_their_rows_from_the_start() -> None:
    spec = SPECS["config T"]
    found = state_specs(spec, POLICY, CONTEXT, "static", "float16")
    assert [s.name for s in found] == [s.name for s in state_specs(spec, POLICY, CONTEXT)]
    assert {(s.kind, s.rows, s.dtype, s.grows) for s in found} == {
        ("ring", 11, "float16", False), ("full", 96, "float16", False)
    }  # fmt: skip
    method = interface(found, 64, PREFILL, Limits(max_context_length=CONTEXT, max_prefill_chunk=20), "int32")
    assert method.dims == {"seq_len": (2, 96), "query_len": (2, 20)}
    assert {t.dtype for t in method.inputs[:2]} == {"int32"}


@pytest.mark.parametrize("layout", ["stacked", "static"])
def test_every_layout_is_accounted_for_byte_by_byte(layout: Layout) -> None:
    """State of the runtime against the plan, which knows layers only."""
    manifest = laid_out(layout)
    state = State(manifest)
    state.ensure_rows(CONTEXT)
    plan = plan_context(layer_states(manifest.states), CONTEXT)
    assert sum(tensor.nbytes for tensor in state.tensors) == plan.total
    assert {k.kind: (k.layers, k.allocated_bytes) for k in state.memory()} == {
        "sliding": (2, plan.kinds["sliding"]), "global": (1, plan.kinds["global"])
    }  # fmt: skip


def laid_out(layout: Layout) -> Manifest:
    manifest = toy_manifest(("ring", "full", "ring"), context=CONTEXT)
    format = next(name for name in formats() if traits(name).layout == layout)
    states = state_specs(manifest.model, manifest.cache, CONTEXT, layout)
    program = manifest.program.model_copy(update={"format": format, "layout": layout, "states": states})
    return manifest.model_copy(update={"programs": (program,)})


def test_a_stacked_state_grows_forks_and_comes_back_with_every_layer(tmp_path: Path) -> None:
    state = State(laid_out("stacked"))
    state.tensors[0].normal_(generator=torch.Generator().manual_seed(0))
    kept = state.tensors[0].clone()
    state.advance(range(4))
    fork = state.fork()
    state.ensure_rows(30)
    assert state.tensors[0].shape == (1, 32, 1, 8) and torch.equal(state.tensors[0][:, :4], kept)
    state.tensors[2][1] = 7.0
    state.save(tmp_path / "talk")
    fork.load(tmp_path / "talk")
    assert torch.equal(fork.tensors[2], state.tensors[2]) and fork.tensors[2][1].eq(7).all()


def test_a_bundle_holds_a_program_a_format(tmp_path: Path) -> None:
    """A program may be a directory; whoever runs one sees its states and no other's."""
    manifest = toy_manifest()
    other = laid_out("stacked").program.model_copy(update={"file": "model.aimodel"})
    both = manifest.model_copy(update={"programs": (manifest.program, other)})
    bundle = toy_bundle(tmp_path / "toy", both, files={"model.aimodel/weights/data": b"w", "model.aimodel/main": b"m"})
    assert {"model.aimodel/weights/data", "model.aimodel/main"} <= read_bundle(bundle.path).manifest.files.keys()
    assert choose(bundle, None).manifest.states == manifest.states
    assert choose(bundle, "coreai").manifest.states == other.states
    with pytest.raises(BundleError, match="got format coreml; expected one of executorch, coreai"):
        choose(bundle, "coreml")


@pytest.mark.parametrize("cache", ["dtype: int8", "global_dtype: int8", "dtype: int8, global_dtype: float16"])
def test_int8_caches_are_executorchs(cache: str, tmp_path: Path) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(f"name: tiny\ncheckpoint: {{path: w}}\ntargets: [executorch, coreml]\ncache: {{{cache}}}\n")
    with pytest.raises(
        ConfigError,
        match=r"cache.dtype and cache.global_dtype float32 or float16 for the targets coreml: int8 caches",
    ):
        load_config(file)
