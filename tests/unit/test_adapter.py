"""Checkpoints whose tensors are not the decoder's: fused, stacked, transposed, in parts; read, written back, refused.

The families here are made up: a table, and the parameters a model would have.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file
from tiny_models import attention, model

from exporter import families
from exporter.checkpoint import Checkpoint, SafetensorsCheckpoint, open_checkpoint, safetensors
from exporter.checkpoint.plan import StoredTensor
from exporter.config import CheckpointConfig
from exporter.errors import CheckpointError, UnsupportedModelError
from exporter.families.base import Described, Family
from exporter.families.tensors import (
    Add,
    Entry,
    Interleaved,
    Mxfp4,
    Names,
    PermutedRows,
    Piece,
    Rows,
    TensorTable,
    Times,
    Transposed,
    entry,
    half_split,
    one_by_one,
    split,
    tensor_table,
    unstacked,
)

SPEC = model(attention())
Stored = Mapping[str, torch.Tensor]
Open = Callable[..., Checkpoint]


def table_of(names: Names, **changes: Any) -> TensorTable:
    """A table without layers."""
    return tensor_table(SPEC.model_copy(update={"layers": ()}), lambda layer: {}, names, layers="layers", **changes)


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Writes `stored` as safetensors of the family whose table is `names`, and opens that."""

    def open_toy(stored: Stored, names: Names, quant_methods: tuple[str, ...] = (), **changes: Any) -> Checkpoint:
        family = Family(("toy",), lambda config: Described(table_of(names, **changes), SPEC), (), None, quant_methods)
        monkeypatch.setitem(families.MODEL_TYPES, "toy", family)
        config = {"model_type": "toy"} | ({"quantization_config": {"quant_method": "mxfp4"}} if quant_methods else {})
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file({key: tensor.contiguous() for key, tensor in stored.items()}, tmp_path / "model.safetensors")
        return open_checkpoint(CheckpointConfig(path=tmp_path))

    return open_toy


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Stored name -> tensor, what they bring, and the parameters they must be, each by plain indexing.
E, M, D = 3, 4, 6  # experts, their size, hidden size
QKV, GATE_UP, STACK, BIAS = (
    random(8 + 4 + 4, D),
    random(2 * M, D),
    random(E, D, 2 * M),
    random(E, 2 * M),
)
EXPERTS = {f"experts.{e}.w1": random(M, D, seed=e) for e in range(E)}
PAIRS, LAYERS, ONE = random(2 * 4, D), random(5, D), random(D)
CASES: dict[str, tuple[Stored, Names, Stored]] = {
    "fused qkv": (
        {"qkv": QKV, "qkv_bias": QKV[:, 0]},
        {"qkv": split({"q": 8, "k": 4, "v": 4}), "qkv_bias": split({"qb": 8, "kb": 4, "vb": 4})},
        {"q": QKV[:8], "k": QKV[8:12], "v": QKV[12:], "qb": QKV[:8, 0], "kb": QKV[8:12, 0], "vb": QKV[12:, 0]},
    ),
    "gate_up in halves": (
        {"gate_up": GATE_UP},
        {"gate_up": split({"gate": M, "up": M})},
        {"gate": GATE_UP[:M], "up": GATE_UP[M:]},
    ),
    "gate_up interleaved": (
        {"gate_up": GATE_UP},
        {"gate_up": (Piece("gate", (Interleaved(2, 0),)), Piece("up", (Interleaved(2, 1),)))},
        {"gate": GATE_UP[[0, 2, 4, 6]], "up": GATE_UP[[1, 3, 5, 7]]},
    ),
    "stacked and transposed experts, columns interleaved": (
        {"gate_up": STACK, "gate_up_bias": BIAS},
        {
            "gate_up": [
                *unstacked(E, "gate", Transposed(), Interleaved(2, 0)),
                *unstacked(E, "up", Transposed(), Interleaved(2, 1)),
            ],
            "gate_up_bias": [*unstacked(E, "gb", Interleaved(2, 0)), *unstacked(E, "ub", Interleaved(2, 1))],
        },
        {
            "gate": torch.stack([STACK[e, :, 0::2].T for e in range(E)]),
            "up": torch.stack([STACK[e, :, 1::2].T for e in range(E)]),
            "gb": BIAS[:, 0::2],
            "ub": BIAS[:, 1::2],
        },
    ),
    "stacked experts, rows in halves": (
        {"gate_up": STACK.mT},
        {"gate_up": [*unstacked(E, "gate", Rows(0, M, 2 * M)), *unstacked(E, "up", Rows(M, 2 * M, 2 * M))]},
        {"gate": STACK.mT[:, :M], "up": STACK.mT[:, M:]},
    ),
    "transposed stack": ({"down": STACK}, {"down": Piece("down", (Transposed(),))}, {"down": STACK.mT}),
    "experts one by one": (
        EXPERTS,
        one_by_one(E, "experts.{}.w1", "gate"),
        {"gate": torch.stack([EXPERTS[f"experts.{e}.w1"] for e in range(E)])},
    ),
    "experts one by one, transposed": (
        EXPERTS,
        one_by_one(E, "experts.{}.w1", "gate", Transposed()),
        {"gate": torch.stack([EXPERTS[f"experts.{e}.w1"].T for e in range(E)])},
    ),
    "parts of several rows": (
        {"shared": PAIRS, "routed": LAYERS},
        {"shared": Piece("router", (), 0), "routed": Piece("router", (), 1)},  # stored in the order of their names
        {"router": torch.cat([PAIRS, LAYERS])},
    ),
    "several layers in one": (
        {"norms": LAYERS},
        {"norms": [Piece(f"layers.{i}.norm", (entry(i, 5),)) for i in range(5)]},
        {f"layers.{i}.norm": LAYERS[i] for i in range(5)},
    ),
    "permuted rows": (
        {"q": PAIRS, "norm": ONE},
        {"q": Piece("q", (half_split(2, 4),)), "norm": Piece("norm", (PermutedRows(1, (5, 4, 3, 2, 1, 0)),))},
        {"q": PAIRS[[0, 2, 1, 3, 4, 6, 5, 7]], "norm": ONE.flip(0)},
    ),
    "folded scale": (
        {"o": PAIRS, "norm": torch.tensor([0.5, -0.25])},
        {"o": Piece("o", (Times(0.25),)), "norm": Piece("norm", (Add(1.0), Times(2.0)))},
        {"o": PAIRS / 4, "norm": torch.tensor([3.0, 1.5])},
    ),
    "stored once, used twice": ({"k": PAIRS}, {"k": (Piece("k"), Piece("v"))}, {"k": PAIRS, "v": PAIRS}),
    "padded rows dropped": ({"head": PAIRS}, {"head": Piece("head", (Rows(0, 5, of=8),))}, {"head": PAIRS[:5]}),
    "a number": ({"scalar": torch.tensor(0.5)}, {"scalar": "scalar"}, {"scalar": torch.tensor(0.5)}),
}  # fmt: skip
ONE_WAY = ("padded rows dropped",)


def shapes(parameters: Stored) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in parameters.items()}


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_read(opened: Open, name: str) -> None:
    stored, names, expected = CASES[name]
    state = opened(stored, names).load_state_dict(shapes(expected))
    assert list(state) == list(expected)
    for key, tensor in expected.items():
        assert torch.equal(state[key], tensor), key
        assert state[key].is_contiguous() and state[key].untyped_storage().nbytes() == state[key].nbytes, key


@pytest.mark.parametrize("name", [name for name in CASES if name not in ONE_WAY])
def test_what_was_read_is_written_back_bit_for_bit(opened: Open, name: str) -> None:
    stored, names, expected = CASES[name]
    checkpoint = opened(stored, names)
    back = checkpoint.stored(checkpoint.load_state_dict(shapes(expected)))
    assert back.keys() == stored.keys()
    for key, tensor in stored.items():
        assert torch.equal(back[key], tensor), key


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_is_read_again(opened: Open, name: str) -> None:
    """Other parameters than were stored, as after a merge. Of padded rows, the padding may be anything."""
    stored, names, expected = CASES[name]
    parameters = {key: tensor * 2 for key, tensor in expected.items()}
    written = opened(stored, names).stored(parameters)
    state = opened(written, names).load_state_dict(shapes(expected))
    assert all(torch.equal(state[key], parameters[key]) for key in parameters)


def test_half_precision_parts_become_float32(opened: Open) -> None:
    stored, names, expected = CASES["experts one by one"]
    state = opened({key: tensor.bfloat16() for key, tensor in stored.items()}, names).load_state_dict(shapes(expected))
    assert state["gate"].dtype == torch.float32
    assert torch.equal(state["gate"], expected["gate"].bfloat16().float())


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("fused qkv", [(0, 8), (8, 12), (12, 16)] * 2),
        ("several layers in one", [(i, i + 1) for i in range(5)]),
        ("stacked experts, rows in halves", [(0, 1), (1, 2), (2, 3)] * 2),
        ("padded rows dropped", [(0, 5)]),
        ("transposed stack", [(0, 3)]),
    ],
)
def test_only_the_rows_of_a_part_are_read(
    opened: Open, monkeypatch: pytest.MonkeyPatch, name: str, read: list[tuple[int, int]]
) -> None:
    stored, names, expected = CASES[name]
    checkpoint = opened(stored, names)
    calls: list[tuple[int, int]] = []
    original = SafetensorsCheckpoint._read

    def watched(self: SafetensorsCheckpoint, tensor: StoredTensor, start: int, stop: int) -> torch.Tensor:
        calls.append((start, stop))
        return original(self, tensor, start, stop)

    monkeypatch.setattr(SafetensorsCheckpoint, "_read", watched)
    checkpoint.load_state_dict(shapes(expected))
    assert calls == read


def test_reading_a_part_a_few_rows_at_a_time_changes_nothing(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, names, expected = CASES["fused qkv"]
    monkeypatch.setattr(safetensors, "WEIGHTS_AT_A_TIME", 3 * D)
    state = opened(stored, names).load_state_dict(shapes(expected))
    assert all(torch.equal(state[key], expected[key]) for key in expected)


def refused(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]], *words: str) -> None:
    """Loading fails, and says so before a tensor is read."""
    with pytest.raises(CheckpointError) as caught, pytest.MonkeyPatch.context() as patch:
        patch.setattr(SafetensorsCheckpoint, "_read", lambda *_: pytest.fail("a tensor was read"))
        checkpoint.load_state_dict(expected)
    for word in words:
        assert word in str(caught.value)


def test_every_kind_of_mistake_is_reported_at_once(opened: Open) -> None:
    stored = {
        "embed": random(3, 2), "a.embed": random(3, 2), "surprise": ONE, "qkv": random(17, D), "norm": random(2),
        "experts.0.w1": random(M, D), "experts.2.w1": random(M, D), "whole": random(2, 3), "part.0": random(3),
        "part.1": random(3), "e0.up": random(2), "other.e0.up": random(2), "e1.up": random(2),
    }  # fmt: skip
    names: dict[str, Entry] = {
        "embed": "embed", "qkv": split({"q": 8, "k": 4, "v": 4}), "norm": "norm", "gone": "gone",
        **one_by_one(E, "experts.{}.w1", "gate"),
        "whole": "stack", **one_by_one(2, "part.{}", "stack"), **one_by_one(2, "e{}.up", "up"),
        "other.e0.up": Piece("up", (), 0),
    }  # fmt: skip
    expected = {
        "embed": (3, 2), "q": (8, D), "k": (4, D), "v": (4, D), "norm": (D,), "gone": (7, 1), "gate": (E, M, D),
        "stack": (2, 3), "up": (2, 2),
    }  # fmt: skip
    refused(
        opened(stored, names, prefixes=("a.",)),
        expected,
        "1 missing tensors (gone [7, 1])",
        "1 unexpected tensors (surprise in model.safetensors)",
        "1 tensors stored twice (embed as a.embed and as embed)",
        "2 overlapping parameters (stack as whole and in parts as part.0; part 0 of up as e0.up and as other.e0.up)",
        f"1 incomplete parameters (gate {[E, M, D]} without experts.1.w1)",
        "2 misshaped tensors (qkv in model.safetensors is [17, 6], not of 16 rows; "
        "norm in model.safetensors is [2], not [6])",
        "expected every parameter of the model, only the model's own, each once, each part of a parameter once, every "
        "part of a parameter, the shapes the model's config implies.",
    )


@pytest.mark.parametrize(
    ("stored", "names", "expected", "words"),
    [
        # What a step makes of a tensor is not what the parameter is.
        (
            {"down": random(E, M, D)}, {"down": Piece("down", (Transposed(),))}, {"down": (E, M, D)},
            "down in model.safetensors is [3, 4, 6], which gives [3, 6, 4] for down, not [3, 4, 6]",
        ),
        # An expert of another size, and one too many.
        (
            {**EXPERTS, "experts.1.w1": random(M + 1, D)}, one_by_one(E, "experts.{}.w1", "gate"), {"gate": (E, M, D)},
            "1 misshaped tensors (experts.1.w1 in model.safetensors is [5, 6], not [4, 6])",
        ),
        (
            {**EXPERTS, "experts.3.w1": random(M, D)}, one_by_one(E, "experts.{}.w1", "gate"), {"gate": (E, M, D)},
            "1 unexpected tensors (experts.3.w1 in model.safetensors)",
        ),
        # A stack of more experts than the model has.
        (
            {"gate": random(E + 1, M, D)}, {"gate": unstacked(E, "gate")}, {"gate": (E, M, D)},
            "gate in model.safetensors is [4, 4, 6], not of 3 rows",
        ),
        # Parts of several rows, of another width and too few together.
        (
            {"a": random(2, 3), "b": random(2, 4)}, {"a": Piece("p", (), 0), "b": Piece("p", (), 1)}, {"p": (4, 3)},
            "b in model.safetensors is [2, 4], not [2, 3]",
        ),
        (
            {"a": random(2, 3), "b": random(1, 3)}, {"a": Piece("p", (), 0), "b": Piece("p", (), 1)}, {"p": (4, 3)},
            "2 parts of p are 3 rows, not 4",
        ),
        # A bias the model does not have, in a tensor of which it has the rest.
        (
            {"qkv": random(4, 2)}, {"qkv": split({"q": 2, "k": 2})}, {"q": (2, 2)},
            "1 unexpected tensors (qkv in model.safetensors)",
        ),
        # One of a pair.
        (
            {"blocks": torch.zeros(2, 1, 16, dtype=torch.uint8)},
            {"blocks": Piece("w", join=Mxfp4(("scales",)))}, {"w": (2, 32)},
            "1 missing tensors (scales beside blocks)",
        ),
        (
            {"scales": torch.zeros(2, 1, dtype=torch.uint8)},
            {"blocks": Piece("w", join=Mxfp4(("scales",)))}, {"w": (2, 32)},
            "1 missing tensors (w [2, 32]); 1 unexpected tensors (scales in model.safetensors)",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    opened: Open, stored: Stored, names: Names, expected: dict[str, tuple[int, ...]], words: str
) -> None:
    refused(opened(stored, names), expected, words)


def test_four_bit_blocks_are_read_entry_by_entry(opened: Open) -> None:
    """GPT-OSS's: two experts, rows interleaved, each row two blocks of 32. Nibble 2 is 1, nibble 9 is -0.5."""
    blocks = torch.full((2, 4, 2, 16), 0x92, dtype=torch.uint8)
    scales = torch.tensor([127, 128, 129, 130], dtype=torch.uint8)[None, :, None] + torch.tensor([0, 4])[:, None, None]
    scales = scales.expand(2, 4, 2).to(torch.uint8)
    names = {
        "gate_up_blocks": [
            piece
            for offset, parameter in enumerate(("gate", "up"))
            for piece in unstacked(2, parameter, Interleaved(2, offset), join=Mxfp4(("gate_up_scales",)))
        ]
    }
    stored = {"gate_up_blocks": blocks, "gate_up_scales": scales}
    expected = {"gate": (2, 2, 64), "up": (2, 2, 64)}
    with pytest.raises(UnsupportedModelError, match=r"quantised already \(MXFP4\)"):
        opened(stored, names, ("awq",))
    state = opened(stored, names, ("awq", "mxfp4")).load_state_dict(expected)
    for e in range(2):
        for row in range(2):
            for offset, parameter in enumerate(("gate", "up")):
                scale = 2.0 ** (2 * row + offset + 4 * e)
                assert state[parameter][e, row].tolist() == [scale, -0.5 * scale] * 32
    floats = {"gate_up_blocks": blocks.float(), "gate_up_scales": scales}
    refused(opened(floats, names), expected, "gate_up_blocks in model.safetensors is F32")
    refused(opened({"w": blocks}, {"w": "w"}), {"w": (2, 4, 2, 16)}, "w in model.safetensors is U8")


def test_a_parameter_that_no_file_stores_is_filled(opened: Open) -> None:
    """Unless the file does store it."""
    constants = {r"layers\.\d+\.q_norm": 1.0, "scale": 3.5}
    names = {"w": "w", "norm": "layers.0.q_norm"}
    expected = {"w": (D,), "layers.0.q_norm": (4,), "scale": ()}
    state = opened({"w": ONE}, names, constants=constants).load_state_dict(expected)
    assert state["layers.0.q_norm"].tolist() == [1.0] * 4 and state["scale"].tolist() == 3.5
    stored = {"w": ONE, "norm": random(4)}
    checkpoint = opened(stored, names, constants=constants)
    state = checkpoint.load_state_dict(expected)
    assert torch.equal(state["layers.0.q_norm"], stored["norm"])
    assert checkpoint.stored(state).keys() == stored.keys()
    refused(opened({"w": ONE}, names), expected, "2 missing tensors (layers.0.q_norm [4]; scale [])")


def test_a_tensor_that_brings_nothing_is_left_out(opened: Open) -> None:
    names = {"w": "w", "k_of_a_layer_that_shares": ()}
    state = opened({"w": ONE, "k_of_a_layer_that_shares": PAIRS}, names).load_state_dict({"w": (D,)})
    assert list(state) == ["w"]


def test_either_form_of_a_parameter_is_read(opened: Open) -> None:
    """Experts one by one or stacked: what the file has decides, and either is complete."""
    names = {**one_by_one(E, "experts.{}.w1", "gate"), "stacked": "gate"}
    stack = torch.stack(list(EXPERTS.values()))
    for stored in (EXPERTS, {"stacked": stack}):
        assert torch.equal(opened(stored, names).load_state_dict({"gate": (E, M, D)})["gate"], stack)


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.Q8_0])
def test_parts_of_gguf_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Type) -> None:
    """Fused rows, entries of a stack and a slice of a vector, out of what the package dequantises whole."""
    source = np.random.default_rng(0)
    stored = {
        "blk.0.attn_qkv.weight": source.standard_normal((8, 64), np.float32),
        "blk.0.ffn_gate_up_exps.weight": source.standard_normal((3, 4, 64), np.float32),
        "blk.0.attn_qkv.bias": source.standard_normal(8).astype(np.float32),
    }
    writer = gguf.GGUFWriter(tmp_path / "toy.gguf", "toy")
    whole: dict[str, np.ndarray] = {}
    for name, value in stored.items():
        as_kind = Type.F32 if value.ndim == 1 else kind
        data = gguf.quants.quantize(value, as_kind)
        whole[name] = gguf.quants.dequantize(data, as_kind).reshape(value.shape)
        writer.add_tensor(name, data, raw_dtype=as_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    names: Names = {
        "attn_qkv.weight": split({"q": 4, "k": 2, "v": 2}),
        "attn_qkv.bias": split({"qb": 4, "kb": 2, "vb": 2}),
        "ffn_gate_up_exps.weight": [*unstacked(3, "gate", Rows(0, 2, 4)), *unstacked(3, "up", Rows(2, 4, 4))],
    }
    table = tensor_table(SPEC, lambda layer: names, {}, layers="blk")
    family = Family(("toy",), print, ("toy",), lambda *_: Described(table, SPEC))  # type: ignore[arg-type]
    monkeypatch.setitem(families.ARCHITECTURES, "toy", family)
    checkpoint = open_checkpoint(CheckpointConfig(path=tmp_path / "toy.gguf"))
    qkv, bias, experts = (whole[f"blk.0.{n}"] for n in ("attn_qkv.weight", "attn_qkv.bias", "ffn_gate_up_exps.weight"))
    expected = {
        "q": qkv[:4], "k": qkv[4:6], "v": qkv[6:], "qb": bias[:4], "kb": bias[4:6], "vb": bias[6:],
        "gate": experts[:, :2], "up": experts[:, 2:],
    }  # fmt: skip
    parameters = {f"layers.0.{name}": torch.from_numpy(value.copy()) for name, value in expected.items()}
    state = checkpoint.load_state_dict(shapes(parameters))
    for name, tensor in parameters.items():
        assert torch.equal(state[name], tensor), name
        assert state[name].untyped_storage().nbytes() == state[name].nbytes
    back = checkpoint.stored(state)
    for name, array in whole.items():
        np.testing.assert_array_equal(back[name].numpy(), array)
