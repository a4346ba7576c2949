"""What the back end writes: sizes, sharing, descriptions, and numbers in every way of keeping weights.

Letters: N output channels, K input channels.
"""

from __future__ import annotations

import math
from collections import Counter
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from coreml_programs import CHUNK, CONTEXT, Weights, built, coreml_decoder
from recipes import recipe_of
from tiny_checkpoints import at, tiny_model
from tiny_models import SPECS, call, one_thread, states_of, token_ids  # noqa: F401

from exporter import optional
from exporter.backends import build_module
from exporter.backends.coreml.build import build, kernels
from exporter.backends.coreml.description import describe
from exporter.backends.coreml.file import Package, read_file
from exporter.backends.coreml.options import CoreMLOptions
from exporter.backends.coreml.precision import FLOAT32, SHIPPED, in_precision
from exporter.backends.coreml.runtime import MLPackageProgram
from exporter.cache.plain import PlainKernels
from exporter.checkpoint import open_checkpoint
from exporter.errors import MissingPackageError
from exporter.grids.int4 import int4_per_group
from exporter.grids.int8 import int8_per_row
from exporter.grids.palettized4 import ENTRIES, palettize
from exporter.model.decoder import Decoder, parameter_shapes
from exporter.programs import Limits
from exporter.progress import Progress
from exporter.spec import CachePolicy, state_specs

# Windows of 8: chunks shorter, longer than the window, one over the ring's end; single tokens over three wraps.
SPLITS = [5, 1, 1, 7, CHUNK, 3, *[1] * 26]


def play(program: MLPackageProgram, decoder: Decoder, splits: list[int]) -> list[torch.Tensor]:
    states, offset, rows = states_of(decoder), 0, []
    ids = token_ids(sum(splits))
    for length in splits:
        positions = torch.zeros(1, offset + length, dtype=torch.int64)
        chunk = torch.tensor([ids[offset : offset + length]])
        rows.append(program.run("main" if length == 1 else "prefill", chunk, positions, states)[0])
        offset += length
    return rows


def play_eager(decoder: Decoder, splits: list[int]) -> list[torch.Tensor]:
    states, offset, rows = states_of(decoder), 0, []
    ids = token_ids(sum(splits))
    for length in splits:
        rows.append(call(decoder, ids[offset : offset + length], offset, states, length == 1))
        offset += length
    return rows


def largest_difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def rounded(decoder: Decoder, weights: Weights, keep_int8: tuple[str, ...] = ()) -> Decoder:
    """The float32 model over PlainKernels with its matrices replaced by what a package of `weights` stands for."""
    twin = coreml_decoder(decoder.spec, slack=decoder.states[0].rows - (decoder.states[0].window or 0))
    twin = twin.with_kernels(PlainKernels())
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if "norm" in name:
                continue
            half = parameter.half().float()
            kept = weights in {"int4", "palettized4"} and any(part in name for part in keep_int8)
            if parameter.dim() == 2 and (weights == "int8" or kept):
                integers, scales = int8_per_row(half)
                half = integers * scales.half().float()[:, None]
            elif parameter.dim() == 2 and weights == "int4":
                integers, steps = int4_per_group(half, 32)
                half = (integers.view(*steps.shape, 32) * steps.half().float()[..., None]).view(half.shape)
            elif parameter.dim() == 2 and weights == "palettized4":
                indices, palettes = palettize(half)
                half = palettes.gather(1, indices.long())
            parameter.copy_(half.half().float())
    return twin


# Twice what was measured, on logits of up to 5.
@pytest.mark.parametrize(("weights", "bound"), [("int8", 1e-2), ("int4", 1e-2), ("palettized4", 1e-2)])
def test_a_compressed_package_computes_with_the_weights_it_stands_for(weights: Weights, bound: float) -> None:
    decoder, result, path = built("gemma", weights)
    ours = play(MLPackageProgram(path, result.program), decoder, SPLITS)
    assert largest_difference(ours, play_eager(rounded(decoder, weights), SPLITS)) < bound
    assert largest_difference(ours, play_eager(rounded(decoder, "float16"), SPLITS)) > 3 * bound


KEPT = ("lm_head", "layers.0.mixer", "down_proj")


@pytest.mark.parametrize("weights", ["int4", "palettized4"])
def test_the_matrices_that_keep_eight_bits_are_known_in_the_program(weights: Weights) -> None:
    """By other names than the parameters of the rounded model: its tied head is called after the embedding."""
    decoder, result, path = built("gemma", weights, keep_int8=KEPT)
    ours = play(MLPackageProgram(path, result.program), decoder, SPLITS)
    parts = ("embed_tokens", *KEPT[1:])
    assert largest_difference(ours, play_eager(rounded(decoder, weights, parts), SPLITS)) < 1e-2
    assert largest_difference(ours, play_eager(rounded(decoder, weights), SPLITS)) > 3e-2
    wanted = {"weights": weights, "keep_int8": list(KEPT), "max_kl_divergence": None}
    assert result.program.options == wanted
    assert result.program.weights == f"{weights}, int8 in {' '.join(KEPT)}"
    matrices = {name: p for name, p in decoder.named_parameters() if p.dim() == 2}
    eight = sum(p.numel() for name, p in matrices.items() if any(part in name for part in parts))
    found = describe(read_file(path)).weight_bytes
    assert 0 < eight == found["int8"]
    four = sum(p.numel() for p in matrices.values()) - eight
    assert four // 2 <= found["uint4" if weights == "palettized4" else "int4"] <= four // 2 + 2048


def test_a_ring_with_slack_needs_no_zeroing() -> None:
    decoder, result, path = built("all sliding", slack=3)
    ours = play(MLPackageProgram(path, result.program), decoder, SPLITS)
    theirs = play_eager(decoder.with_kernels(PlainKernels()), SPLITS)
    assert largest_difference(ours, theirs) < 0.1  # of 8; 0.046 was measured


@pytest.mark.parametrize("weights", ["float32", "float16", "int8", "int4", "palettized4"])
def test_weights_are_stored_once(weights: Weights) -> None:
    decoder, result, path = built("gemma", weights)
    parameters = dict(decoder.named_parameters())  # a tied head is none of its own
    bits = {"float32": 32, "float16": 16, "int8": 8, "int4": 4, "palettized4": 4}[weights]
    matrices = [p for p in parameters.values() if p.dim() == 2]
    expected = sum(p.numel() for p in matrices) * bits // 8
    found = describe(read_file(path)).weight_bytes
    kind = {"palettized4": "uint4"}.get(weights, weights)
    if weights == "float32":
        expected += sum(p.numel() for p in parameters.values() if p.dim() == 1) * 4
    # Beside the matrices: the inverse frequencies of two RoPEs, zeros for biases, the positions of a ring.
    assert expected <= found[kind] <= expected + 2048
    if weights == "palettized4":
        assert found["lut"] == sum(len(p) for p in matrices) * ENTRIES * 2
    if weights in {"int8", "int4"}:
        assert found["scales"] == sum(p.numel() // (32 if weights == "int4" else p.shape[1]) for p in matrices) * 2
    assert result.program.weights == weights and result.program.operators
    counted = result.program.recipe.stored_bytes
    assert counted <= sum(found.values()) <= counted + 4096


def test_a_package_describes_itself() -> None:
    decoder, result, path = built("gemma")
    description = describe(read_file(path))
    assert description.format == "coreml" and [f.name for f in description.functions] == ["main", "prefill"]
    main, prefill = description.functions
    assert main.inputs == (("input_ids", "int32", "[1, 1]"), ("position_ids", "int32", f"[1, 1..{CONTEXT}]"))
    assert prefill.inputs == (
        ("input_ids", "int32", f"[1, 2..{CHUNK}]"),
        ("position_ids", "int32", f"[1, 2..{CONTEXT}]"),
    )
    rows = tuple((s.name, "float16", f"[1, {s.rows}, 2, 16]") for s in decoder.states)
    assert main.states == prefill.states == rows and rows[-1][2] == f"[1, {CONTEXT}, 2, 16]"
    assert main.outputs == prefill.outputs == (("logits", "float32", "[1, 97]"),)
    assert main.operators["write_state"] == len(rows) and "tile" not in main.operators
    assert description.file_bytes == sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    assert set(result.program.operators) == {*main.operators, *prefill.operators}


@pytest.mark.parametrize("family", ["gemma3_text", "qwen2", "qwen3"])
def test_a_checkpoint_agrees_with_eager(family: str, tmp_path: Path) -> None:
    """From the files of a family to the program. What the others have is a part of these."""
    two = {"layer_types": ["sliding_attention", "full_attention"]} if family == "gemma3_text" else {}
    tiny_model(family, num_hidden_layers=2, **two).save_pretrained(tmp_path / "model")
    checkpoint = open_checkpoint(at(tmp_path / "model"))
    states = state_specs(checkpoint.spec, CachePolicy(), 64, "static", "float16")
    weights = checkpoint.load_state_dict(parameter_shapes(checkpoint.spec), lambda done, total: None)
    decoder = Decoder.from_state_dict(checkpoint.spec, states, kernels(CoreMLOptions()), weights)
    limits = Limits(max_context_length=64, max_prefill_chunk=24)
    options = CoreMLOptions(weights="float32")
    recipe = recipe_of(decoder.spec, options)
    result = build(decoder, limits, options, recipe, directory=tmp_path, step=Progress.silent().step)
    # Windows of 8: a chunk of three of them that straddles a ring's end, a small one that does, single tokens.
    splits = [5, 24, 1, 1, 3, *[1] * 10]
    ours = play(MLPackageProgram(tmp_path / result.program.file, result.program), decoder, splits)
    theirs = play_eager(decoder.with_kernels(PlainKernels()), splits)
    largest = max(float(row.abs().max()) for row in theirs)
    assert largest_difference(ours, theirs) < 5e-4 * largest


def test_precision_of_the_twin() -> None:
    decoder = coreml_decoder(SPECS["gemma"])
    before = {name: parameter.clone() for name, parameter in decoder.named_parameters()}
    twin = in_precision(decoder, SHIPPED)
    dtypes = {name.replace(".inner", ""): p.dtype for name, p in twin.named_parameters()}
    assert dtypes.keys() == before.keys()
    assert all(dtype is (torch.float32 if "norm" in name else torch.float16) for name, dtype in dtypes.items())
    assert twin.lm_head.weight is twin.embed_tokens.weight  # type: ignore[union-attr]
    assert all(torch.equal(p, before[name]) and p.dtype is torch.float32 for name, p in decoder.named_parameters())
    same = in_precision(decoder, FLOAT32)
    assert all(p.data_ptr() == q.data_ptr() for p, q in zip(decoder.parameters(), same.parameters(), strict=True))


def test_what_is_float32_in_a_package() -> None:
    """The norms, the residual sum and the rotary angles; matrices, attention and everything between them are float16.

    Two layers of four norms and two of queries and keys, and the last norm; one base of angles; two sums a layer.
    """
    _, _, path = built("gemma")
    for function in Package(path).functions().values():
        made: dict[str, Counter[str]] = {}
        for operation in function.operations:
            kinds = [typed.dtype for typed in operation.outputs.values() if len(typed.shape) > 1]
            made.setdefault(operation.type, Counter()).update(kinds)
        assert made["reduce_mean"] == made["rsqrt"] == {"float32": 2 * 6 + 1}
        assert made["cos"] == made["sin"] == {"float32": 1}
        assert made["softmax"] == {"float16": 2} and made["linear"] == {"float16": 2 * 7 + 1}
        assert made["matmul"] == {"float16": 2 * 2}
        hidden = [
            typed.dtype
            for operation in function.operations
            for typed in operation.outputs.values()
            if operation.type == "add" and typed.shape[-1:] == (64,) and len(typed.shape) == 3
        ]
        assert hidden == ["float32"] * 4, hidden


def test_a_palette_is_a_fixed_point_of_k_means() -> None:
    weight = torch.randn(2, 640, generator=torch.Generator().manual_seed(0))
    indices, palettes = palettize(weight)
    assert palettes.shape == (2, ENTRIES) and indices.dtype is torch.uint8 and int(indices.max()) == ENTRIES - 1
    for values, chosen, palette in zip(weight, indices.long(), palettes, strict=True):
        distance = (values[:, None] - palette).abs()
        assert torch.equal(distance.gather(1, chosen[:, None])[:, 0], distance.min(1).values)
        means = torch.stack([values[chosen == entry].mean() for entry in range(ENTRIES)])
        assert (means - palette).abs().max() < 0.05
        # 16 levels of a normal distribution: Lloyd and Max's optimum is 0.0095 of the variance.
        assert float((values - palette[chosen]).square().mean() / values.var()) < 0.0105
    few = torch.tensor([[1.0, -1.0, 0.5, 0.0]]).repeat(3, 8)
    indices, palettes = palettize(few)
    assert palettes.shape == (3, ENTRIES) and torch.equal(palettes.gather(1, indices.long()), few)


def test_the_missing_converter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(optional, "version", absent)
    with pytest.raises(MissingPackageError, match=r"no coremltools; .*pip install 'ring-exporter\[coreml\]'"):
        build_module("coreml")


def test_positions_beyond_float16_turn_exactly() -> None:
    """cos and sin at position 40,000 of the twin are those of float32 rounded once, not those of a rounded position."""
    twin = in_precision(coreml_decoder(SPECS["gemma"]), SHIPPED)
    cos, _ = twin.rotary_tables[0](torch.tensor([40_000.0]))
    exact = torch.tensor([math.cos(40_000.0 * float(f)) for f in twin.rotary_tables[0].inner.inv_freq])
    assert cos.dtype is torch.float16 and (cos.flatten().float() - exact).abs().max() < 6e-3
