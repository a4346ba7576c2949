"""Steps between stored tensors and parameters: what each takes, from its definition, and that it goes back exactly."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exporter.families.tensors import (
    Add,
    Interleaved,
    MisfitError,
    Mxfp4,
    PermutedRows,
    Piece,
    Rows,
    Step,
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
from exporter.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec

Shape = tuple[int, ...]


def numbered(*shape: int) -> torch.Tensor:
    """0, 1, 2 .. in the order of memory."""
    return torch.arange(float(math.prod(shape))).view(shape)


def bits(shape: Shape, seed: int) -> torch.Tensor:
    """Any 32 bits, NaN and infinities among them."""
    source = np.random.default_rng(seed)
    return torch.from_numpy(source.integers(-(2**31), 2**31, shape, np.int64).astype(np.int32)).view(torch.float32)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def test_rows_and_an_entry() -> None:
    assert Rows(1, 3, of=4).take(numbered(4, 2)).tolist() == [[2, 3], [4, 5]]
    assert Rows(1, 3, of=4).take(numbered(4)).tolist() == [1, 2]
    assert entry(2, of=3).take(numbered(3, 2)).tolist() == [4, 5]


def test_interleaved_rows_and_columns() -> None:
    assert Interleaved(2, 1).take(numbered(4, 2)).tolist() == [[2, 3], [6, 7]]
    columns = Piece("up", (Transposed(), Interleaved(2, 1)))
    assert columns.take(numbered(2, 4)).tolist() == [[1, 5], [3, 7]]


def test_transposed_leaves_the_stack_alone() -> None:
    stack = Transposed().take(numbered(2, 3, 4))
    assert stack.shape == (2, 4, 3)
    assert all(stack[e, i, j] == numbered(2, 3, 4)[e, j, i] for e in range(2) for i in range(4) for j in range(3))


def test_permuted_rows_stay_in_their_group() -> None:
    assert PermutedRows(2, (2, 0, 1)).take(numbered(6)).tolist() == [2, 0, 1, 5, 3, 4]


def test_half_split_moves_pairs_into_halves() -> None:
    """Two heads of 4 rows: the pairs (0, 1), (2, 3) of each head become its halves."""
    rows = torch.arange(8.0)
    assert half_split(2, 4).take(rows).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    matrix = rows[:, None].expand(8, 3)
    assert half_split(2, 4).take(matrix).tolist() == [[r] * 3 for r in (0, 2, 1, 3, 4, 6, 5, 7)]


def test_arithmetic() -> None:
    piece = Piece("norm", (Add(1.0), Times(0.5)))
    assert piece.take(torch.tensor([0.0, 3.0])).tolist() == [0.5, 2.0]
    assert piece.put(torch.zeros(2), torch.tensor([0.5, 2.0])).tolist() == [0.0, 3.0]


SIZES = st.integers(1, 4)


@st.composite
def coverings(draw: st.DrawFn) -> tuple[Shape, Sequence[Piece]]:
    """The shape of a stored tensor, and pieces that take every element of it once."""
    n, d, e, step = draw(SIZES), draw(SIZES), draw(SIZES), draw(SIZES)
    order = tuple(draw(st.permutations(range(draw(st.integers(1, 6))))))
    every = [Piece(f"p{offset}", (Interleaved(step, offset),)) for offset in range(step)]
    kinds: list[tuple[Shape, Sequence[Piece]]] = [
        ((n, d), [Piece("p")]),
        ((n, d), [Piece("p", (Transposed(),))]),
        ((e, n, d), [Piece("p", (Transposed(),))]),
        ((step * n, d), every),
        ((step * n,), every),
        ((n, step * d), [replace(piece, steps=(Transposed(), *piece.steps)) for piece in every]),
        ((n * len(order), d), [Piece("p", (PermutedRows(n, order),))]),
        ((sum(order) + len(order), d), split({f"p{i}": rows + 1 for i, rows in enumerate(order)})),
        ((sum(order) + len(order),), split({f"p{i}": rows + 1 for i, rows in enumerate(order)})),
        ((e, n, d), unstacked(e, "p", Transposed())),
        ((e, d, step * n), [p for o in range(step) for p in unstacked(e, f"p{o}", Transposed(), Interleaved(step, o))]),
        ((e, step * n), [p for o in range(step) for p in unstacked(e, f"p{o}", Interleaved(step, o))]),
        ((e, 2 * n, d), [p for a in (0, n) for p in unstacked(e, f"p{a}", Rows(a, a + n, 2 * n), half_split(1, n))])
        if n % 2 == 0
        else ((e, 2 * n, d), [p for a in (0, n) for p in unstacked(e, f"p{a}", Rows(a, a + n, 2 * n))]),
        ((2 * e * 4, d), [Piece(f"p{a}", (Rows(4 * e * a, 4 * e * (a + 1), 8 * e), half_split(e, 4))) for a in (0, 1)]),
    ]
    return draw(st.sampled_from(kinds))


@given(coverings(), st.integers(0, 2**32))
def test_what_moves_is_put_back_bit_for_bit(covering: tuple[Shape, Sequence[Piece]], seed: int) -> None:
    shape, pieces = covering
    x = bits(shape, seed)
    parts = [piece.take(x) for piece in pieces]
    assert sum(part.numel() for part in parts) == x.numel()
    back = bits(shape, seed + 1)
    for piece, part in zip(pieces, parts, strict=True):
        back = piece.put(back, part)
    assert same_bits(back, x)


@given(coverings(), st.integers(0, 2**32))
def test_what_is_put_is_taken_again(covering: tuple[Shape, Sequence[Piece]], seed: int) -> None:
    shape, pieces = covering
    for piece in pieces:
        part = bits(tuple(piece.take(torch.empty(shape, device="meta")).shape), seed)
        assert same_bits(piece.take(piece.put(bits(shape, seed + 1), part)), part)


@given(st.lists(st.integers(-(2**20), 2**20), min_size=1), st.integers(-8, 8), st.sampled_from([1.0, -0.5, 3.0]))
def test_arithmetic_is_undone_where_floats_are_exact(numbers: list[int], power: int, addend: float) -> None:
    """Multiples of 2^-2 below 2^19, and powers of two: nothing is rounded, so everything comes back."""
    x = torch.tensor(numbers, dtype=torch.float32) / 4
    piece = Piece("norm", (Add(addend), Times(2.0**power)))
    assert same_bits(piece.put(torch.empty_like(x), piece.take(x)) + 0.0, x + 0.0)


@given(st.lists(st.floats(-4, 4, width=32), min_size=1))
def test_a_norm_read_written_and_read_is_the_norm_that_was_read(numbers: list[float]) -> None:
    """What ``w + 1`` rounds away is gone, and nothing more than once."""
    piece, x = Piece("norm", (Add(1.0),)), torch.tensor(numbers, dtype=torch.float32)
    once = piece.take(x)
    assert torch.equal(piece.take(piece.put(x, once)), once)


@pytest.mark.parametrize(
    ("step", "shape", "words"),
    [
        (Rows(0, 2, of=4), (5, 2), "not of 4 rows"),
        (Rows(0, 2, of=4), (), "not of 4 rows"),
        (entry(0, of=3), (4, 2, 2), "not of 3 rows"),
        (Interleaved(2, 0), (5, 2), "not of a multiple of 2 rows"),
        (Transposed(), (5,), "not a matrix"),
        (PermutedRows(2, (1, 0)), (6, 2), "not of 4 rows"),
    ],
)
def test_a_tensor_of_another_shape_does_not_fit(step: Step, shape: Shape, words: str) -> None:
    with pytest.raises(MisfitError, match=words):
        step.take(torch.empty(shape, device="meta"))


def test_an_order_that_loses_a_row_is_no_order() -> None:
    with pytest.raises(AssertionError, match="every row once"):
        PermutedRows(1, (0, 0, 1))


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4_oracle(blocks: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """Value by value: sign, two bits of exponent and one of mantissa, times a power of two for 32 of them."""
    out = np.zeros((*scales.shape, 32))
    for place in np.ndindex(*scales.shape):
        for i in range(32):
            byte = int(blocks[place][i // 2])
            nibble = byte >> 4 if i % 2 else byte & 15
            magnitude = FP4[nibble & 7] * (-1 if nibble & 8 else 1)
            out[(*place, i)] = magnitude * 2.0 ** (int(scales[place]) - 127)
    return out.reshape(*scales.shape[:-1], -1).astype(np.float32)


def test_mxfp4_from_its_definition() -> None:
    source = np.random.default_rng(0)
    blocks = torch.from_numpy(source.integers(0, 256, (2, 3, 2, 16)).astype(np.uint8))
    scales = torch.from_numpy(source.integers(100, 140, (2, 3, 2)).astype(np.uint8))
    values = Mxfp4(("scales",)).take(blocks, scales)
    assert values.dtype == torch.float32 and values.shape == (2, 3, 64)
    np.testing.assert_array_equal(values.numpy(), mxfp4_oracle(blocks, scales))
    assert (values.abs() > 0).sum() > 300


def test_mxfp4_blocks_and_scales_that_do_not_belong_together() -> None:
    with pytest.raises(MisfitError, match=r"with scales \[3, 4\], not one a block"):
        Mxfp4(("scales",)).take(torch.zeros(3, 2, 16, dtype=torch.uint8), torch.zeros(3, 4, dtype=torch.uint8))
    with pytest.raises(MisfitError, match="blocks of 16 bytes"):
        Mxfp4(("scales",)).take(torch.zeros(3, 2, 8, dtype=torch.uint8), torch.zeros(3, 2, dtype=torch.uint8))


def test_a_table_gives_every_layer_its_names() -> None:
    def layer(spec: LayerSpec) -> dict[str, str | Piece | tuple[Piece, ...]]:
        assert isinstance(spec.mixer, AttentionSpec)
        heads = spec.mixer.num_attention_heads
        return {
            "qk": split({"mixer.q": heads, "mixer.k": 1}),
            "norm": Piece("norm.weight", (Add(1.0),)),
            "blocks": unstacked(2, "experts", Transposed(), join=Mxfp4(("scales",))),
            "left_out": (),
            **one_by_one(2, "e{}.up", "up"),
        }

    def attention(heads: int) -> AttentionSpec:
        return AttentionSpec(
            num_attention_heads=heads, num_key_value_heads=1, head_dim=2, window=None, scale=1.0, rope=None
        )

    mlp = MLPSpec(intermediate_size=2, activation="silu")
    layers = tuple(LayerSpec(mixer=attention(heads), feed_forward=mlp) for heads in (2, 3))
    spec = ModelSpec(
        family="toy", vocab_size=4, hidden_size=2, layers=layers, norm_eps=1.0, tie_word_embeddings=True,
        max_position_embeddings=8,
    )  # fmt: skip
    table = tensor_table(spec, layer, {"emb": "embed"}, layers="blk", prefixes=("a.b.", "a."), ignored=(r".*junk",))
    assert table.pieces["emb"] == (Piece("embed"),)
    assert table.pieces["blk.0.qk"] == (
        Piece("layers.0.mixer.q", (Rows(0, 2, 3),)),
        Piece("layers.0.mixer.k", (Rows(2, 3, 3),)),
    )
    assert table.pieces["blk.1.qk"][0] == Piece("layers.1.mixer.q", (Rows(0, 3, 4),))
    assert table.pieces["blk.1.norm"] == (Piece("layers.1.norm.weight", (Add(1.0),)),)
    assert table.pieces["blk.1.blocks"][1] == Piece(
        "layers.1.experts", (entry(1, 2), Transposed()), 1, Mxfp4(("blk.1.scales",))
    )
    assert table.parts["layers.1.up"] == {0: "blk.1.e0.up", 1: "blk.1.e1.up"}
    assert "blk.2.norm" not in table.pieces
    assert [table.key(name) for name in ("a.b.emb", "a.emb", "emb", "b.emb")] == ["emb", "emb", "emb", "b.emb"]
    assert [table.is_raw(name) for name in ("a.blk.0.scales", "blk.1.blocks", "blk.0.qk")] == [True, True, False]
    assert [table.is_ignored(name) for name in ("a.junk", "a.blk.0.left_out", "emb", "what")] == [
        True,
        True,
        False,
        False,
    ]


def test_parts_with_a_gap_are_our_mistake() -> None:
    table = TensorTable({"a": (Piece("p", (), 0),), "c": (Piece("p", (), 2),)})
    with pytest.raises(AssertionError, match=r"p has parts \[0, 2\]"):
        _ = table.parts
