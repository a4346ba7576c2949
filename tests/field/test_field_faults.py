"""Faults that others met in public, each under its number in docs/field-faults.md.

The numbers that are missing here are tested where their subject is; the table there says where.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHUNK, CONTEXT, WINDOW
from tiny_models import KERNELS, SPECS, decoder_of, one_thread, play, states_of, token_ids  # noqa: F401

import runtime_ref
from exporter import pipeline
from exporter.backends.executorch import build as pte_build
from exporter.backends.executorch.file import read_pte
from exporter.bundle import read_bundle
from exporter.config import load_config
from exporter.errors import GraphContractError
from exporter.families import from_hf
from exporter.progress import Progress
from exporter.source import open_source, target_decoder
from exporter.spec import AttentionSpec, CachePolicy, ModelSpec, ShortConvSpec, state_specs
from runtime_ref.generate import Generation
from runtime_ref.programs import load_program
from runtime_ref.sampling import Sampler
from runtime_ref.tokenizer import Tokenizer

LOGITS = 1e-4  # of tiny models in float32, whose logits are below 100


def ids_of(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("slack", [0, 3])
def test_03_chunks_of_2_4_8_and_16_equal_token_by_token(kernels: str, slack: int) -> None:
    decoder, ids = decoder_of(SPECS["config T"], kernels=kernels, slack=slack), token_ids(48)
    stepped = play(decoder, ids, [1] * 48, states_of(decoder))
    for size in (2, 4, 8, 16):
        for position, logits in play(decoder, ids, [size] * (48 // size), states_of(decoder)).items():
            assert (logits - stepped[position]).abs().max() < LOGITS, (size, position)


def test_08_the_shipped_program_generates_past_every_local_cache(tiny_bundle: Path) -> None:
    session = runtime_ref.load(tiny_bundle)
    capacity = max(state.rows for state in session.manifest.states if state.kind == "ring")
    wanted, bundle = WINDOW + capacity + 10, read_bundle(tiny_bundle)
    ends = list(bundle.manifest.tokenizer.eos_token_ids)

    class NeverEnds(Sampler):
        def __call__(self, logits: torch.Tensor) -> int:
            return super().__call__(logits.index_fill(0, torch.tensor(ends), -1e9))

    generation = Generation(session, Tokenizer(bundle), ids_of(5), sampler=NeverEnds(), max_new_tokens=wanted)
    text = "".join(generation)
    assert len(generation.tokens) == wanted and generation.reason == f"{wanted} new tokens"
    assert session.length == 5 + wanted - 1 and text
    # Each of them is what the whole conversation, run afresh, would have said.
    again = runtime_ref.load(tiny_bundle)
    logits = again.prefill(session.state.tokens)
    assert NeverEnds()(logits) == generation.tokens[-1]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("context", "slack"), [(192, 0), (192, 5), (4, 0)])
def test_12_each_layer_has_the_rows_of_its_own_kind(name: str, context: int, slack: int) -> None:
    """A hybrid model: a global layer may always hold the whole context, whatever the windows beside it are."""
    spec = SPECS[name]
    states = state_specs(spec, CachePolicy(ring_slack=slack), context)
    for index, layer in enumerate(spec.layers):
        rows = {state.max_rows for state in states if state.layers == (index,)}
        if isinstance(layer.mixer, ShortConvSpec):
            assert rows == {layer.mixer.kernel_size - 1}
        elif layer.mixer.window is None:
            assert rows == {context}
        else:
            assert rows == {min(layer.mixer.window, context) + slack}


BASE = {
    "num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 97,
}  # fmt: skip


@pytest.mark.parametrize(
    "family",
    [
        {"model_type": "llama"},
        {"model_type": "mistral", "sliding_window": 8},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
        {"model_type": "qwen3"},
        {"model_type": "gemma3_text", "sliding_window": 8},
    ],
    ids=lambda family: family["model_type"],
)
@pytest.mark.parametrize("factor", [None, 4.0])
def test_24_every_spelling_of_the_rotation_gives_the_same_model(family: dict[str, Any], factor: float | None) -> None:
    def spec(spelling: dict[str, Any]) -> ModelSpec:
        return from_hf(BASE | family | spelling)[1]

    scaled = {"rope_type": "default"} if factor is None else {"rope_type": "linear", "factor": factor}
    flat = spec({"rope_theta": 5e5, "rope_scaling": None if factor is None else scaled})
    if family["model_type"] != "gemma3_text":
        old_scaled = None if factor is None else {"type": "linear", "factor": factor}
        assert spec({"rope_theta": 5e5, "rope_scaling": old_scaled}) == flat
        assert spec({"rope_parameters": scaled | {"rope_theta": 5e5}}) == flat
    else:
        by_layer = {
            "full_attention": scaled | {"rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
        assert spec({"rope_parameters": by_layer}) == flat
    ropes = {
        layer.mixer.rope.theta for layer in flat.layers if isinstance(layer.mixer, AttentionSpec) and layer.mixer.rope
    }
    assert 5e5 in ropes  # the value arrived, in each of them


def test_37_the_largest_chunk_runs_at_the_end_of_the_largest_context(tiny_bundle: Path) -> None:
    """No length of the example was baked in: every declared maximum at once."""
    stepped, chunked = runtime_ref.load(tiny_bundle), runtime_ref.load(tiny_bundle)
    ids, calls = ids_of(CONTEXT), []
    chunked.observer = lambda position, _: calls.append(position)
    last = chunked.prefill(ids, CHUNK)
    assert calls == list(range(CHUNK - 1, CONTEXT, CHUNK)) and chunked.length == CONTEXT
    torch.testing.assert_close(last, stepped.prefill(ids, 1), atol=LOGITS, rtol=0)


def test_41_both_methods_share_the_callers_state_and_programs_share_none(tiny_bundle: Path) -> None:
    """What `prefill` wrote is read by any program's `main` over the same tensors, and by none over others."""
    ids, bundle = ids_of(20), read_bundle(tiny_bundle)
    session = runtime_ref.load(tiny_bundle)
    session.prefill(ids)
    states, program, unrelated = session.state.tensors, session.program, load_program(bundle)

    def main(run: Any, seq_len: int, tensors: list[torch.Tensor]) -> torch.Tensor:
        positions = torch.arange(seq_len)[None]
        logits: torch.Tensor = run.run("main", torch.tensor([[7]]), positions, [t.clone() for t in tensors])[0]
        return logits

    empty = [torch.zeros_like(t) for t in states]
    continued = main(program, 21, states)
    assert torch.equal(main(unrelated, 21, states), continued)  # it never saw the prompt, the tensors did
    assert torch.equal(main(program, 1, empty), main(unrelated, 1, empty))  # nothing is left in the one that did
    assert not torch.equal(main(program, 1, empty), continued)


@pytest.mark.parametrize("name", ["tiny_bundle", "llama_bundle"])
def test_42_the_file_stores_the_models_weights_and_hardly_more(request: pytest.FixtureRequest, name: str) -> None:
    """Against the bytes of the model's own parameters, tied ones once: what is stored at distinct places."""
    bundle = request.getfixturevalue(name)
    source = open_source(load_config(bundle.with_suffix(".yaml")))
    decoder = target_decoder(source, "executorch", Progress.silent())
    weights = sum(p.numel() * p.element_size() for p in decoder.parameters())
    file = read_pte((bundle / "model.pte").read_bytes())
    places = {blob.offset: blob.size for blob in (*file.constants.values(), *file.named)}
    tables = sum(b.numel() * b.element_size() for b in decoder.buffers())
    assert weights <= sum(places.values()) <= 1.05 * (weights + tables)


def test_44_an_operator_the_named_runtime_lacks_stops_the_export(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runtime, registry = pte_build.runtime_registry()
    data = (tiny_bundle / "model.pte").read_bytes()
    monkeypatch.setattr(pte_build, "lower", lambda programs, path: path.write_bytes(data))
    monkeypatch.setattr(pte_build, "runtime_registry", lambda: (runtime, registry - {"aten::embedding.out"}))
    with pytest.raises(
        GraphContractError, match=r"operators_in_registry failed \(aten::embedding\.out is not in the runtime"
    ):
        pipeline.export(load_config(tiny_bundle.with_suffix(".yaml")), tmp_path / "out", Progress.silent())
    assert not list(tmp_path.iterdir())
