"""Hugging Face directories: what loads, and what is refused before any tensor is read."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import CONFIGS, at, decoder_logits, tiny_model

from exporter.checkpoint import SafetensorsCheckpoint, open_checkpoint, safetensors
from exporter.checkpoint.source import sha256_file
from exporter.errors import CheckpointError, UnsupportedModelError
from exporter.model.decoder import parameter_shapes

IDS = [5, 17, 96, 3, 3, 41, 60, 2, 88, 9, 10, 11, 54, 23, 7, 31]


def saved(tmp_path: Path, model_type: str = "llama", **changes: Any) -> tuple[Path, Any]:
    model = tiny_model(model_type, **changes)
    path = tmp_path / "model"
    model.save_pretrained(path)
    return path, model


def load(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(at(path))
    return checkpoint.load_state_dict(parameter_shapes(checkpoint.spec))


def test_reading_a_few_rows_at_a_time_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From bfloat16, as most checkpoints are: 97 rows of 64 five at a time, and vectors."""
    path, model = saved(tmp_path)
    model.bfloat16().save_pretrained(path)
    monkeypatch.setattr(safetensors, "WEIGHTS_AT_A_TIME", 5 * 64)
    weights = load(path)
    assert torch.equal(weights["embed_tokens.weight"], model.state_dict()["model.embed_tokens.weight"].float())
    assert torch.equal(weights["norm.weight"], model.state_dict()["model.norm.weight"].float())


def rewrite(path: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replace, add or (None) drop tensors of a single-file checkpoint."""
    tensors: dict[str, Any] = load_file(path / "model.safetensors") | change
    save_file({k: v.clone() for k, v in tensors.items() if v is not None}, path / "model.safetensors")


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refused(path: Path, *words: str) -> str:
    """Loading fails, and says so before a tensor is read."""
    with pytest.raises(CheckpointError) as caught, pytest.MonkeyPatch.context() as patch:
        patch.setattr(SafetensorsCheckpoint, "_read", lambda *_: pytest.fail("a tensor was read"))
        load(path)
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_logits_equal_transformers(tmp_path: Path, model_type: str) -> None:
    path, model = saved(tmp_path, model_type)
    checkpoint = open_checkpoint(at(path))
    ours = decoder_logits(checkpoint.spec, load(path), IDS)
    with torch.no_grad():
        theirs = model(torch.tensor([IDS])).logits[0]
    assert theirs.abs().max() > 1
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_gemma_norms_gain_one_and_nothing_else_changes(tmp_path: Path) -> None:
    path, model = saved(tmp_path, "gemma3_text")
    state, stored = load(path), model.state_dict()
    for ours, theirs in (
        ("layers.3.input_norm.weight", "model.layers.3.input_layernorm.weight"),
        ("layers.3.mixer.q_norm.weight", "model.layers.3.self_attn.q_norm.weight"),
        ("layers.3.post_mixer_norm.weight", "model.layers.3.post_attention_layernorm.weight"),
        ("layers.3.feed_forward_norm.weight", "model.layers.3.pre_feedforward_layernorm.weight"),
        ("layers.3.post_feed_forward_norm.weight", "model.layers.3.post_feedforward_layernorm.weight"),
        ("norm.weight", "model.norm.weight"),
    ):
        assert torch.equal(state[ours], stored[theirs] + 1), ours
    assert torch.equal(state["embed_tokens.weight"], stored["model.embed_tokens.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_becomes_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    path, model = saved(tmp_path)
    model.to(dtype).save_pretrained(path)
    state = load(path)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    key = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(state["layers.1.feed_forward.up_proj.weight"], model.state_dict()[key].float())


def test_shards_equal_the_single_file(tmp_path: Path) -> None:
    path, model = saved(tmp_path)
    single = load(path)
    shards = tmp_path / "shards"
    model.save_pretrained(shards, max_shard_size="50KB")
    assert len(list(shards.glob("model-*.safetensors"))) > 2
    sharded = load(shards)
    assert list(single) == list(sharded)
    assert all(torch.equal(single[key], sharded[key]) for key in single)


def test_the_source_lists_every_file_by_name_and_hash(tmp_path: Path) -> None:
    path, model = saved(tmp_path)
    model.save_pretrained(path, max_shard_size="50KB")
    (path / "model.safetensors").unlink(missing_ok=True)
    source = open_checkpoint(at(path, license="MIT")).source
    assert (source.kind, source.name, source.license) == ("safetensors", "model", "MIT")
    names = {p.name for p in path.iterdir() if "model" in p.name or p.name == "config.json"}
    assert source.files == {name: sha256_file(path / name) for name in names}


def test_progress_counts_to_the_end(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    checkpoint = open_checkpoint(at(path))
    shapes = parameter_shapes(checkpoint.spec)
    calls: list[tuple[int, int]] = []
    checkpoint.load_state_dict(shapes, lambda done, total: calls.append((done, total)))
    assert calls == [(i + 1, len(shapes)) for i in range(len(shapes))]


@pytest.mark.parametrize(
    "prefix", ["language_model.model.", "model.language_model.", "language_model.", ""], ids=lambda p: p or "none"
)
def test_multimodal_gemma_loads_its_text_half(tmp_path: Path, prefix: str) -> None:
    path, model = saved(tmp_path, "gemma3_text")
    plain = load(path)
    text = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}}))
    renamed = {prefix + key.removeprefix("model."): value for key, value in model.state_dict().items()}
    renamed.pop(prefix + "lm_head.weight")
    for vision in ("vision_tower.a.weight", "multi_modal_projector.b", "model.vision_tower.c.bias"):
        renamed[vision] = torch.ones(3)
    save_file({key: value.clone() for key, value in renamed.items()}, path / "model.safetensors")
    state = load(path)
    assert all(torch.equal(plain[key], state[key]) for key in plain)


def test_missing_unexpected_and_misshaped_tensors_are_reported_together(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    rewrite(
        path,
        {
            "model.layers.0.mlp.up_proj.weight": None,
            "model.layers.1.mlp.up_proj.weight": None,
            "model.layers.0.self_attn.surprise.weight": torch.zeros(3),
            "model.layers.2.mlp.gate_proj.weight": torch.zeros(96, 64),
            "model.norm.weight": torch.zeros(65),
        },
    )
    refused(
        path,
        "2 missing tensors (layers.0.feed_forward.up_proj.weight [96, 64]; layers.1.feed_forward",
        "2 unexpected tensors",
        "model.layers.0.self_attn.surprise.weight in model.safetensors",
        "model.layers.2.mlp.gate_proj.weight",
        "1 misshaped tensors (model.norm.weight in model.safetensors is [65], not [64])",
    )


def test_a_long_list_is_cut(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    rewrite(path, {f"surprise.{i}": torch.zeros(1) for i in range(9)})
    message = refused(path, "9 unexpected tensors", "and 4 more")
    assert message.count("surprise.") == 5


def test_one_parameter_stored_twice(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    rewrite(path, {"norm.weight": torch.zeros(64)})
    refused(path, "norm.weight as model.norm.weight and as norm.weight")


def test_biases_the_config_denies_are_unexpected(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    edit_config(path, attention_bias=False)
    refused(path, "unexpected tensors", "self_attn.k_proj.bias")


def test_tied_model_with_an_equal_head_loads(tmp_path: Path) -> None:
    path, model = saved(tmp_path, tie_word_embeddings=True)
    plain = load(path)
    assert "lm_head.weight" not in plain
    rewrite(path, {"lm_head.weight": model.state_dict()["model.embed_tokens.weight"]})
    state = load(path)
    assert list(state) == list(plain)
    assert all(torch.equal(plain[key], state[key]) for key in plain)


def test_tied_model_with_another_head_is_an_error(tmp_path: Path) -> None:
    path, model = saved(tmp_path, tie_word_embeddings=True)
    rewrite(path, {"lm_head.weight": model.state_dict()["model.embed_tokens.weight"] + 1})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight that differs from the embedding"):
        load(path)


def test_untied_model_without_a_head_is_an_error(tmp_path: Path) -> None:
    path, _ = saved(tmp_path, tie_word_embeddings=False)
    rewrite(path, {"lm_head.weight": None})
    refused(path, "missing tensors (lm_head.weight [97, 64])")


def test_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    plain = load(path)
    rewrite(
        path,
        {
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
            "model.rotary_emb.inv_freq": torch.zeros(8),
        },
    )
    assert list(load(path)) == list(plain)


def shard_index(path: Path) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((path / "model.safetensors.index.json").read_text())
    return index


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    tiny_model("llama").save_pretrained(path, max_shard_size="50KB")
    return path


def test_an_index_that_names_a_tensor_its_shard_lacks(sharded: Path) -> None:
    index = shard_index(sharded)
    files = sorted(set(index["weight_map"].values()))
    key = next(k for k, f in index["weight_map"].items() if f == files[0])
    index["weight_map"][key] = files[1]
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(sharded, f"{key} in {files[1]}", "every tensor the index names")


def test_a_shard_that_is_not_there(sharded: Path) -> None:
    file = sorted(sharded.glob("model-*.safetensors"))[1]
    file.unlink()
    refused(sharded, file.name, "every shard beside the index")


def test_an_index_may_not_point_outside(sharded: Path) -> None:
    index = shard_index(sharded)
    outside = sharded.parent / "outside.safetensors"
    save_file({"x": torch.zeros(1)}, outside)
    index["weight_map"]["x"] = "../outside.safetensors"
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(sharded, "../outside.safetensors", "every shard beside the index")


@pytest.mark.parametrize("keep", [4, 200, -1])
def test_a_truncated_file(tmp_path: Path, keep: int) -> None:
    path, _ = saved(tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(path, "model.safetensors", "complete safetensors file")


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    rewrite(path, {"model.norm.weight": torch.zeros(64, dtype=torch.int8)})
    refused(path, "model.norm.weight in model.safetensors is I8", "BF16")


@pytest.mark.parametrize(
    ("text", "word"), [("{", "readable JSON"), ("[]", "a JSON object"), (None, "without config.json")]
)
def test_a_broken_config(tmp_path: Path, text: str | None, word: str) -> None:
    path, _ = saved(tmp_path)
    (path / "config.json").unlink()
    if text is not None:
        (path / "config.json").write_text(text)
    refused(path, word)


def test_an_unknown_model_type(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    edit_config(path, model_type="mamba")
    with pytest.raises(UnsupportedModelError, match="mamba"):
        open_checkpoint(at(path))


class Malicious:
    """Unpickled, it creates the file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (str(self.marker), "w")


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt"])
@pytest.mark.parametrize("directly", [True, False])
def test_pickles_are_refused_unopened(tmp_path: Path, suffix: str, directly: bool) -> None:
    path, _ = saved(tmp_path)
    (path / "model.safetensors").unlink()
    marker = tmp_path / "marker"
    file = path / f"pytorch_model{suffix}"
    file.write_bytes(pickle.dumps(Malicious(marker)))
    with pytest.raises(CheckpointError, match=rf"pytorch_model{suffix}.*pickled"):
        open_checkpoint(at(file if directly else path))
    assert not marker.exists()
    pickle.loads(file.read_bytes())
    assert marker.exists(), "the pickle was harmless, and the test with it"


def test_safetensors_win_over_a_pickle_beside_them(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    marker = tmp_path / "marker"
    (path / "pytorch_model.bin").write_bytes(pickle.dumps(Malicious(marker)))
    assert load(path)
    assert not marker.exists()


def test_a_directory_without_weights(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    (path / "model.safetensors").unlink()
    refused(path, "without weights", "model.safetensors.index.json")


def test_a_weight_file_without_its_directory(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    with pytest.raises(CheckpointError, match="Name the directory"):
        open_checkpoint(at(path / "model.safetensors"))


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(at(tmp_path / "nowhere"))


def test_sha256_of_the_weights_is_verified(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    good = sha256_file(path / "model.safetensors")
    assert open_checkpoint(at(path, sha256=good)).spec.vocab_size == 97
    with pytest.raises(CheckpointError, match=f"sha256 {good}; expected sha256 {'0' * 64}"):
        open_checkpoint(at(path, sha256="0" * 64))


def test_one_sha256_cannot_speak_for_shards(sharded: Path) -> None:
    with pytest.raises(CheckpointError, match=r"one sha256 for \d+ shards"):
        open_checkpoint(at(sharded, sha256="0" * 64))


def proj(path: Path) -> dict[str, torch.Tensor]:
    return {key: value for key, value in load_file(path / "model.safetensors").items() if "proj" in key}


STORED: dict[str, dict[str, Any]] = {  # what stands in place of a weight [N, K] and beside it
    "GPTQ": {"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16, "g_idx": torch.int32},
    "GPTQ or AWQ": {"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16},
    "MLX": {"weight": torch.uint32, "scales": torch.float16, "biases": torch.float16},
    "bitsandbytes": {"weight": torch.uint8, "weight.absmax": torch.float32, "weight.quant_map": torch.float32,
                     "weight.quant_state.bitsandbytes__nf4": torch.uint8},
    "FP8": {"weight": torch.float8_e4m3fn},
    "FP8 ": {"weight": torch.float8_e4m3fn, "weight_scale_inv": torch.float32},
    "compressed-tensors": {"weight_packed": torch.int32, "weight_scale": torch.float16, "weight_shape": torch.int64},
    "HQQ": {"W_q": torch.uint8, "scale": torch.float16, "zero": torch.float16},
    "EETQ": {"weight": torch.int8, "weight_scales": torch.float16},
    "an int8 format": {"weight": torch.int8},
    "MXFP4": {"weight_blocks": torch.uint8, "weight_scales_": torch.uint8},
}  # fmt: skip


@pytest.mark.parametrize("name", STORED)
def test_quantised_weights_are_named_as_such(tmp_path: Path, name: str) -> None:
    """By their tensors, where the config says nothing."""
    path, _ = saved(tmp_path)
    change: dict[str, torch.Tensor | None] = {}
    for key in proj(path):
        change[key] = None
        for suffix, dtype in STORED[name].items():
            change[f"{key.removesuffix('weight')}{suffix}"] = torch.ones(4, 8, dtype=torch.uint8).to(dtype)
    rewrite(path, change)
    with pytest.raises(UnsupportedModelError, match=rf"quantised already \({name.strip()}\).* Take the unquantised"):
        load(path)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "AWQ"),
        ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "MLX"),
        ({"quantization": {"bits": 4}, "quantization_config": {"bits": 4}}, "MLX"),
        ({"quantization_config": {"producer": {"name": "modelopt"}, "quant_algo": "FP8"}}, "ModelOpt"),
        ({"quantization_config": {"bits": 4}}, "a method that config.json does not name"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization_config": {"quant_method": "newest"}}, "newest"),
    ],
)
def test_a_config_that_says_quantised_is_believed(tmp_path: Path, config: dict[str, Any], name: str) -> None:
    path, _ = saved(tmp_path)
    edit_config(path, **config)
    with pytest.raises(UnsupportedModelError, match=rf"quantised already \({name}\)"):
        load(path)


@pytest.mark.parametrize(
    "name",
    ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapters.safetensors", "adapters.npz",
     "adapter_0.pt", "lora.safetensors", "pytorch_lora_weights.safetensors", "style-lora.safetensors",
     "style_LoRA.gguf"],
)  # fmt: skip
def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path, name: str) -> None:
    path, _ = saved(tmp_path)
    (path / name).write_bytes(b"{}")
    refused(path, f"an adapter beside the weights ({name})", "merge_and_unload")
    (path / name).unlink()
    (path / "checkpoint-5").mkdir()
    (path / "checkpoint-5" / name).write_bytes(b"{}")
    assert load(path)


ADAPTERS = ["q_proj.lora_A.weight", "q_proj.lora_B.default.weight", "q_proj.lokr_w1", "q_proj.hada_w1_a",
            "q_proj.ia3_l", "q_proj.oft_r.weight", "lora_unet_q_proj.lora_down.weight"]  # fmt: skip


@pytest.mark.parametrize("key", ADAPTERS)
def test_an_adapter_is_known_by_its_tensors(tmp_path: Path, key: str) -> None:
    """Among the weights, and in a file beside them that is called anything; other files beside them say nothing."""
    path, _ = saved(tmp_path)
    key = f"base_model.model.model.layers.0.self_attn.{key}"
    save_file({"layers.0.attention.wq.weight": torch.zeros(4, 64)}, path / "consolidated.safetensors")
    (path / "damaged.safetensors").write_bytes((10).to_bytes(8, "little") + b"{" + b"x" * 9)
    load(path)
    save_file({key: torch.zeros(4, 64)}, path / "epoch_3.safetensors")
    refused(path, "an adapter beside the weights (epoch_3.safetensors)")
    (path / "epoch_3.safetensors").unlink()
    rewrite(path, {key: torch.zeros(4, 64)})
    refused(path, f"an adapter beside the weights ({key})")


@pytest.mark.parametrize("lacking", ["config.json", "model.safetensors"])
def test_an_adapter_alone_is_named(tmp_path: Path, lacking: str) -> None:
    path, _ = saved(tmp_path)
    (path / "adapter_config.json").write_text("{}")
    (path / lacking).unlink()
    refused(path, "an adapter beside the weights (adapter_config.json)")


def test_weights_of_another_name_are_said(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    (path / "model.safetensors").rename(path / "gptq_model-4bit-128g.safetensors")
    refused(path, "without weights of that name, but with gptq_model-4bit-128g.safetensors")
    edit_config(path, quantization_config={"quant_method": "gptq"})
    with pytest.raises(UnsupportedModelError, match=r"quantised already \(GPTQ\)"):
        load(path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool])
def test_weights_of_another_dtype_are_named_with_what_to_do(tmp_path: Path, dtype: torch.dtype) -> None:
    path, _ = saved(tmp_path)
    rewrite(path, {key: value.to(dtype) for key, value in proj(path).items()})
    refused(path, "more; expected weights of type F32, F16, BF16. Save the weights as float32")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("key", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_weight_that_is_no_number_is_named(tmp_path: Path, key: str, value: float) -> None:
    path, model = saved(tmp_path)
    weight = model.state_dict()[key].clone()
    weight.view(-1)[-1] = value
    rewrite(path, {key: weight})
    with pytest.raises(CheckpointError, match=rf"NaN or infinity in \S+ \({key}\)"):
        load(path)
