"""GGUF files whose layers differ: heads, KV heads, MLP and windows from arrays of one value a layer."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from oracle import oracle_logits
from tiny_checkpoints import at, decoder_logits, llama_cpp_permute

from exporter.checkpoint import open_checkpoint
from exporter.model.decoder import parameter_shapes
from exporter.spec import AttentionSpec, MLPSpec

HEADS, KV_HEADS, INNER, SLIDES = [4, 2, 8], [2, 2, 1], [96, 32, 64], [False, True, True]
SIZE, HIDDEN, VOCAB, WINDOW = 16, 64, 97, 5
IDS = [5, 17, 96, 3, 3, 41, 60, 2, 88, 9, 10, 11]
NORMS = {"attn_norm": "input_norm", "ffn_norm": "feed_forward_norm"}
POST_NORMS = {"post_attention_norm": "post_mixer_norm", "post_ffw_norm": "post_feed_forward_norm"}


def tensors(gemma: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    """GGUF's name -> the decoder's, and the shape."""
    names: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd": ("embed_tokens", (VOCAB, HIDDEN)),
        "output_norm": ("norm", (HIDDEN,)),
    }
    for i in range(3):
        q, kv = HEADS[i] * SIZE, KV_HEADS[i] * SIZE
        layer: dict[str, tuple[str, tuple[int, ...]]] = {
            "attn_q": ("mixer.q_proj", (q, HIDDEN)),
            "attn_k": ("mixer.k_proj", (kv, HIDDEN)),
            "attn_v": ("mixer.v_proj", (kv, HIDDEN)),
            "attn_output": ("mixer.o_proj", (HIDDEN, q)),
            "ffn_gate": ("feed_forward.gate_proj", (INNER[i], HIDDEN)),
            "ffn_up": ("feed_forward.up_proj", (INNER[i], HIDDEN)),
            "ffn_down": ("feed_forward.down_proj", (HIDDEN, INNER[i])),
        }
        layer |= {name: (norm, (HIDDEN,)) for name, norm in (NORMS | (POST_NORMS if gemma else {})).items()}
        layer |= {f"attn_{x}_norm": (f"mixer.{x}_norm", (SIZE,)) for x in ("qk" if gemma else "")}
        names |= {f"blk.{i}.{name}": (f"layers.{i}.{ours}", shape) for name, (ours, shape) in layer.items()}
    return {f"{name}.weight": (f"{ours}.weight", shape) for name, (ours, shape) in names.items()}


def write(path: Path, architecture: str) -> dict[str, torch.Tensor]:
    """Writes the file, and returns its tensors as the decoder calls them, in half-split order."""
    gemma, source = architecture == "gemma3", np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(3)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(SIZE)
    writer.add_layer_norm_rms_eps(1e-6)
    if gemma:
        writer.add_sliding_window(WINDOW)
        writer.add_sliding_window_pattern(SLIDES)
    weights: dict[str, torch.Tensor] = {}
    for name, (ours, shape) in tensors(gemma).items():
        value = (source.standard_normal(shape) * 0.2).astype(np.float32)
        weights[ours] = torch.from_numpy(value)
        permuted = not gemma and name.endswith(("attn_q.weight", "attn_k.weight"))
        writer.add_tensor(name, llama_cpp_permute(value, shape[0] // SIZE) if permuted else value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_every_layer_has_its_own_numbers_and_the_models_logits(tmp_path: Path, architecture: str) -> None:
    gemma = architecture == "gemma3"
    weights = write(tmp_path / "layers.gguf", architecture)
    checkpoint = open_checkpoint(at(tmp_path / "layers.gguf"))
    for i, layer in enumerate(checkpoint.spec.layers):
        assert isinstance(layer.mixer, AttentionSpec) and isinstance(layer.feed_forward, MLPSpec)
        assert (layer.mixer.num_attention_heads, layer.mixer.num_key_value_heads) == (HEADS[i], KV_HEADS[i])
        assert layer.mixer.window == (WINDOW if gemma and SLIDES[i] else None)
        assert layer.feed_forward.intermediate_size == INNER[i]
    state = checkpoint.load_state_dict(parameter_shapes(checkpoint.spec))
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[name], weights[name]) for name in weights)
    ours = decoder_logits(checkpoint.spec, state, IDS)
    expected = oracle_logits(checkpoint.spec, weights, IDS)
    assert expected.abs().max() > 1
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-4)
