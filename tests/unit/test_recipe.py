"""The recipe of a program, parameter by parameter, as the options define it, and the bits and bytes that follow."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from tiny_models import CONV, GLOBAL, MOE, SLIDING, model

from exporter.backends.coreai.options import CoreAIOptions
from exporter.backends.coreml.options import CoreMLOptions
from exporter.backends.executorch.options import ExecutorchOptions
from exporter.errors import ConfigError
from exporter.grids import grid, names
from exporter.model.decoder import parameter_shapes
from exporter.spec import EMBEDDING, HEAD, PRESETS, SENSITIVE, FormatOptions, GridSpec, Recipe

# 10,000 tokens, 64 channels, 4 heads of 16, 2 KV heads, 96 inner channels, one layer.
V, D, KV, INNER = 10_000, 64, 32, 96
LAYER = {
    "mixer.q_proj.weight": (D, D),
    "mixer.k_proj.weight": (KV, D),
    "mixer.v_proj.weight": (KV, D),
    "mixer.o_proj.weight": (D, D),
    "mixer.q_norm.weight": (16,),
    "mixer.k_proj.bias": (KV,),
    "input_norm.weight": (D,),
    "feed_forward_norm.weight": (D,),
    "feed_forward.gate_proj.weight": (INNER, D),
    "feed_forward.up_proj.weight": (INNER, D),
    "feed_forward.down_proj.weight": (D, INNER),
}
TIED = {EMBEDDING: (V, D), **{f"layers.0.{name}": shape for name, shape in LAYER.items()}, "norm.weight": (D,)}
UNTIED = {**TIED, HEAD: (V, D)}
NORMS = ("layers.0.mixer.q_norm.weight", "layers.0.input_norm.weight", "layers.0.feed_forward_norm.weight",
         "norm.weight")  # fmt: skip
BIAS = "layers.0.mixer.k_proj.bias"
Q, K, OUT = (f"layers.0.mixer.{name}_proj.weight" for name in "qko")
GATE, UP = (f"layers.0.feed_forward.{name}_proj.weight" for name in ("gate", "up"))
VALUES, DOWN = "layers.0.mixer.v_proj.weight", "layers.0.feed_forward.down_proj.weight"
LINEARS = (Q, K, VALUES, OUT, GATE, UP, DOWN)


def form(part: GridSpec) -> str:
    """In a few words: the grid, the columns of a scale and its dtype, zero points, palette, GPTQ, rows."""
    words = [part.grid]
    if part.scales is not None:
        words.append(f"/{part.group_size or 'row'} {part.scales}")
    words += [f" zero {part.zero_points}"] if part.zero_points else []
    words += [f" x{part.palette}"] if part.palette else []
    words += [" gptq"] if part.gptq else []
    return "".join(words)


def forms(recipe: Recipe) -> dict[str, str]:
    found = {}
    for name in recipe.names:
        own = recipe[name]
        found[name] = "lm_head" if own.part is None else form(own.part)
        if own.exact is not None:
            found[name] += f" | {own.exact.count} {form(own.exact.part)} of {own.exact.of}"
    return found


def recipe_of(options: FormatOptions, tied: bool = True, shapes: dict[str, tuple[int, ...]] | None = None) -> Recipe:
    return options.recipe(shapes or (TIED if tied else UNTIED), tied)


def quantized(**rules: Any) -> ExecutorchOptions:
    return ExecutorchOptions.model_validate({"quantization": rules})


FLOATS = dict.fromkeys((*NORMS, BIAS), "float32")
ALL_INT8 = dict.fromkeys(LINEARS, "int8/row float32 gptq")
GROUPED = "int8_grouped/32 float16"


def exact_head(count: int, tied: bool) -> str:
    """At most a 32nd of the rows; a tied one's are the embedding's."""
    return f"int4/32 bfloat16 gptq | {min(count, V // 32)} {GROUPED} of {EMBEDDING if tied else None}"


PRESET_FORMS: dict[str, dict[bool, dict[str, str]]] = {
    "none": {
        True: {EMBEDDING: "lm_head", HEAD: "float32", **dict.fromkeys(LINEARS, "float32")},
        False: {EMBEDDING: "float32", HEAD: "float32", **dict.fromkeys(LINEARS, "float32")},
    },
    "accurate": {tied: {EMBEDDING: GROUPED, HEAD: exact_head(4096, tied), **ALL_INT8} for tied in (True, False)},
    "balanced": {tied: {EMBEDDING: GROUPED, HEAD: exact_head(1024, tied), **ALL_INT8} for tied in (True, False)},
    "small": {
        tied: {
            EMBEDDING: GROUPED,
            HEAD: exact_head(1024, tied),
            **dict.fromkeys((Q, OUT, GATE, UP), "int4/32 bfloat16 gptq"),
            **dict.fromkeys((K, VALUES, DOWN), "int8/row float32 gptq"),
        }
        for tied in (True, False)
    },
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_parameter_by_parameter(preset: str, tied: bool) -> None:
    recipe = recipe_of(ExecutorchOptions.model_validate({"quantization": preset}), tied)
    assert forms(recipe) == FLOATS | PRESET_FORMS[preset][tied]
    calibrated = preset != "none"
    assert recipe.smooth == recipe.is_calibrated == calibrated and recipe.is_float32 != calibrated
    assert recipe[HEAD].tied_to is None and recipe[EMBEDDING].tied_to == (HEAD if tied else None)
    assert [name for name in recipe.names if recipe[name].gathered] == [EMBEDDING]


@pytest.mark.parametrize(
    ("rules", "tied", "expected"),
    [
        ({"head": "int8"}, True, {EMBEDDING: "float32", HEAD: "int8/row float32"}),
        ({"embedding": "int4"}, True, {EMBEDDING: "int4/32 bfloat16", HEAD: "float32"}),
        ({"embedding": "int8"}, True, {EMBEDDING: "int8/row float32", HEAD: "float32"}),
        ({"embedding": "int4", "head": "int8"}, True, {EMBEDDING: "lm_head", HEAD: "int8/row float32"}),
        ({"embedding": "int4", "head": "int4"}, True, {EMBEDDING: "lm_head", HEAD: "int4/32 bfloat16"}),
        ({"embedding": "int4", "head": "int8"}, False, {EMBEDDING: "int4/32 bfloat16", HEAD: "int8/row float32"}),
        ({"head": "int4", "group_size": 64, "rounding": "gptq"}, False,
         {EMBEDDING: "float32", HEAD: "int4/64 bfloat16 gptq"}),
        # Four bits are too few for an embedding of eight, and a scale a row is not one a group.
        ({"embedding": "int8", "head": "int4"}, True, {EMBEDDING: "int8/row float32", HEAD: "int4/32 bfloat16"}),
        ({"embedding": "int8_grouped", "head": "int8"}, True, {EMBEDDING: GROUPED, HEAD: "int8/row float32"}),
        ({"embedding": "int4", "head": "int4", "head_exact_rows": 100}, True,
         {EMBEDDING: "lm_head", HEAD: f"int4/32 bfloat16 | 100 {GROUPED} of None"}),
        ({"embedding": "int8_grouped", "head": "int8", "head_exact_rows": 9999}, True,
         {EMBEDDING: GROUPED, HEAD: f"int8/row float32 | 312 {GROUPED} of {EMBEDDING}"}),
        ({"linear": "int4", "keep_int8": ("down_proj", "layers.0.mixer.q")}, True,
         {EMBEDDING: "lm_head", HEAD: "float32", **dict.fromkeys(LINEARS, "int4/32 bfloat16"),
          DOWN: "int8/row float32", Q: "int8/row float32"}),
    ],
)  # fmt: skip
def test_mappings_parameter_by_parameter(rules: dict[str, Any], tied: bool, expected: dict[str, str]) -> None:
    recipe = recipe_of(quantized(**rules), tied)
    assert forms(recipe) == FLOATS | dict.fromkeys(LINEARS, "float32") | expected
    assert not recipe.smooth and recipe.is_calibrated == ("rounding" in rules)


KEPT = ("lm_head", "layers.0.mixer.q", "down_proj")
APPLE: list[tuple[FormatOptions, dict[str, str], dict[str, str]]] = [
    # what matrices are, and which are not that; the tables of the untied model, where they differ
    (CoreMLOptions(weights="float32"), {"matrices": "float32", BIAS: "float32"}, {}),
    (CoreMLOptions(), {"matrices": "float16"}, {}),
    (CoreMLOptions(weights="int8"), {"matrices": "int8/row float16"}, {}),
    (CoreMLOptions(weights="int4", keep_int8=()), {"matrices": "int4/32 float16"}, {}),
    (CoreMLOptions(weights="int4"), {
        "matrices": "int4/32 float16", **dict.fromkeys((VALUES, DOWN, HEAD), "int8/row float16"),
    }, {EMBEDDING: "int8/row float16"}),
    (CoreMLOptions(weights="int4", keep_int8=KEPT), {
        "matrices": "int4/32 float16", **dict.fromkeys((Q, DOWN, HEAD), "int8/row float16"),
    }, {EMBEDDING: "int4/32 float16"}),
    (CoreMLOptions(weights="palettized4"), {
        "matrices": "palettized4/row float16 x16", **dict.fromkeys((VALUES, DOWN, HEAD), "int8/row float16"),
    }, {EMBEDDING: "int8/row float16"}),
    (CoreAIOptions(weights="float32"), {"matrices": "float32"}, {}),
    (CoreAIOptions(), {"matrices": "float16"}, {}),
    (CoreAIOptions(weights="int8"), {"matrices": "int8/row float32"}, {}),
    (CoreAIOptions(weights="int4", keep_int8=()), {"matrices": "int4_shifted/32 float32 zero int4"}, {}),
    (CoreAIOptions(weights="int4"), {
        "matrices": "int4_shifted/32 float32 zero int4",
        **dict.fromkeys((VALUES, DOWN, HEAD), "int8/row float32"),
    }, {EMBEDDING: "int8/row float32"}),
]  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("options", "said", "tables"), APPLE)
def test_every_option_of_apples_formats(
    options: FormatOptions, said: dict[str, str], tables: dict[str, str], tied: bool
) -> None:
    said = dict(said)
    matrices = said.pop("matrices")
    floats = dict.fromkeys(NORMS, "float32") | {BIAS: "float16" if isinstance(options, CoreMLOptions) else "float32"}
    expected = floats | dict.fromkeys((*LINEARS, HEAD, EMBEDDING), matrices) | said
    expected |= {EMBEDDING: "lm_head"} if tied else tables
    assert forms(recipe_of(options, tied)) == expected
    assert not recipe_of(options, tied).is_calibrated


def test_a_tied_matrix_is_kept_by_either_of_its_names() -> None:
    for name in ("embed_tokens", "lm_head"):
        options = CoreMLOptions(weights="int4", keep_int8=(name,))
        assert form(recipe_of(options, True).part(EMBEDDING)) == "int8/row float16"
        untied = {key: recipe_of(options, False).part(key).grid for key in (EMBEDDING, HEAD)}
        assert untied == {EMBEDDING: "int4", HEAD: "int4"} | {f"{name}.weight": "int8"}


@pytest.mark.parametrize("options", [CoreMLOptions(weights="int4", keep_int8=()), CoreAIOptions(weights="int4"),
                                     CoreMLOptions(weights="palettized4", keep_int8=())])  # fmt: skip
def test_small_matrices_and_odd_rows_in_apples_formats(options: FormatOptions) -> None:
    """Below 1,024 weights nothing is reduced; rows that are no whole number of 32 have 8 bits, but on palettes."""
    shapes = {
        EMBEDDING: (97, 80), "layers.0.mixer.q_proj.weight": (64, 80), "layers.0.mixer.o_proj.weight": (80, 64),
        "layers.0.mixer.k_proj.weight": (15, 68), "layers.0.feed_forward.router.weight": (32, 80),
        "layers.0.feed_forward.experts.gate_proj": (4, 96, 80), "layers.0.feed_forward.experts.gate_bias": (4, 96),
        "layers.0.mixer.conv.weight": (80, 1, 64),
    }  # fmt: skip
    found = {name: said.split("/")[0] for name, said in forms(recipe_of(options, True, shapes)).items()}
    left_alone = "float32" if isinstance(options, CoreAIOptions) else "float16"
    four, odd = {
        "int4": ("int4_shifted", "int8") if isinstance(options, CoreAIOptions) else ("int4", "int8"),
        "palettized4": ("palettized4", "palettized4"),
    }[options.weights]  # type: ignore[attr-defined]
    kept = "int8" if isinstance(options, CoreAIOptions) else odd
    assert found == dict.fromkeys(shapes, left_alone) | {
        EMBEDDING: "lm_head", HEAD: kept, "layers.0.mixer.q_proj.weight": odd, "layers.0.mixer.o_proj.weight": four,
    }  # fmt: skip


def test_every_parameter_has_a_form_and_experts_can_be_named() -> None:
    for spec in (model(SLIDING, CONV, GLOBAL), model(SLIDING, feed_forward=MOE, tie_word_embeddings=False)):
        shapes = parameter_shapes(spec)
        for options in (ExecutorchOptions.model_validate({"quantization": "small"}), CoreMLOptions(weights="int4")):
            recipe = options.recipe(shapes, spec.tie_word_embeddings)
            assert set(recipe.names) == {*shapes, HEAD}
            assert all(recipe[name].shape == shape for name, shape in shapes.items())
    gate = recipe["layers.0.feed_forward.experts.gate_proj"]
    assert gate.shape == (4, 32, 64) and gate.part is not None and gate.part.grid == "float16"
    assert recipe.is_float("layers.0.feed_forward.router.weight")


def test_alike_parameters_stand_together_and_the_manifest_says_no_more_than_it_must() -> None:
    two = {**TIED, **{name.replace("layers.0.", "layers.1."): shape for name, shape in TIED.items()}}
    recipe = recipe_of(ExecutorchOptions.model_validate({"quantization": "balanced"}), True, two)
    written = json.loads(recipe.model_dump_json())
    assert Recipe.model_validate(written) == recipe
    assert written["smooth"] is True
    by_name = {tuple(own["parameters"]): own for own in written["kept"]}
    int8 = {"grid": "int8", "codes": "int8", "scales": "float32", "gptq": True}
    assert by_name["layers.0.mixer.k_proj.weight", "layers.0.mixer.v_proj.weight",
                   "layers.1.mixer.k_proj.weight", "layers.1.mixer.v_proj.weight"] == {
        "parameters": ["layers.0.mixer.k_proj.weight", "layers.0.mixer.v_proj.weight",
                       "layers.1.mixer.k_proj.weight", "layers.1.mixer.v_proj.weight"],
        "shape": [KV, D], "part": int8,
    }  # fmt: skip
    grouped = {"grid": "int8_grouped", "codes": "int8", "group_size": 32, "scales": "float16"}
    assert by_name[HEAD,] == {
        "parameters": [HEAD], "shape": [V, D],
        "part": {"grid": "int4", "codes": "int4", "group_size": 32, "scales": "bfloat16", "gptq": True},
        "exact": {"count": V // 32, "part": grouped, "of": EMBEDDING},
    }  # fmt: skip
    assert by_name[EMBEDDING,] == {
        "parameters": [EMBEDDING], "shape": [V, D], "part": grouped, "gathered": True, "tied_to": HEAD,
    }  # fmt: skip


LINEAR_WEIGHTS = 2 * D * D + 2 * KV * D + 3 * INNER * D
LINEAR_ROWS = 3 * D + 2 * KV + 2 * INNER
FLOAT_WEIGHTS = 16 + KV + 3 * D


@pytest.mark.parametrize(
    ("options", "tied", "read", "beside"),
    [
        # bytes that every token goes through, and those of an embedding that is looked up
        (quantized(), True, 4 * (LINEAR_WEIGHTS + FLOAT_WEIGHTS + V * D), 0),
        (quantized(), False, 4 * (LINEAR_WEIGHTS + FLOAT_WEIGHTS + V * D), 4 * V * D),
        (quantized(linear="int8", embedding="int8", head="int8"), True,
         LINEAR_WEIGHTS + 4 * (LINEAR_ROWS + FLOAT_WEIGHTS) + V * (D + 4), 0),
        (quantized(linear="int8", embedding="int8", head="int8"), False,
         LINEAR_WEIGHTS + 4 * (LINEAR_ROWS + FLOAT_WEIGHTS) + V * (D + 4), V * (D + 4)),
        # a row of 64: 32 bytes of nibbles and two groups' bfloat16 scales
        (quantized(embedding="int8", head="int4"), True, 4 * (LINEAR_WEIGHTS + FLOAT_WEIGHTS) + V * 36, V * (D + 4)),
        # with exact rows: so many of them more, from the embedding's bytes, 64 and two float16 scales a row
        (quantized(embedding="int8_grouped", head="int4", head_exact_rows=300), True,
         4 * (LINEAR_WEIGHTS + FLOAT_WEIGHTS) + V * 36 + 300 * 68, (V - 300) * 68),
        (quantized(embedding="int4", head="int4", head_exact_rows=300), False,
         4 * (LINEAR_WEIGHTS + FLOAT_WEIGHTS) + V * 36 + 300 * 68, (V - 300) * 68 + V * 36),
        (quantized(embedding="int4", head="int4"), True, 4 * (LINEAR_WEIGHTS + FLOAT_WEIGHTS) + V * 36, 0),
        (quantized(embedding="int4"), True, 4 * (LINEAR_WEIGHTS + FLOAT_WEIGHTS + V * D), V * 36),
        (quantized(head="int8"), True, 4 * (LINEAR_WEIGHTS + FLOAT_WEIGHTS) + V * (D + 4), 4 * V * D),
        (CoreMLOptions(), False, 2 * (LINEAR_WEIGHTS + KV + V * D) + 4 * (FLOAT_WEIGHTS - KV), 2 * V * D),
        (CoreMLOptions(weights="palettized4", keep_int8=()), True,
         LINEAR_WEIGHTS // 2 + 32 * LINEAR_ROWS + 2 * KV + 4 * (FLOAT_WEIGHTS - KV) + V * (D // 2 + 32), 0),
        (CoreMLOptions(weights="int4", keep_int8=("embed",)), False,
         LINEAR_WEIGHTS // 2 + LINEAR_WEIGHTS // 16 + 2 * KV + 4 * (FLOAT_WEIGHTS - KV) + V * 36, V * (D + 2)),
        # of 32 weights: 16 bytes, a float32 scale, half a byte of a zero point
        (CoreAIOptions(weights="int4", keep_int8=()), True,
         (LINEAR_WEIGHTS + V * D) // 32 * 41 // 2 + 4 * FLOAT_WEIGHTS, 0),
    ],
)  # fmt: skip
def test_bytes_and_bits_by_hand(options: FormatOptions, tied: bool, read: int, beside: int) -> None:
    recipe = recipe_of(options, tied)
    assert recipe.stored_bytes == read + beside and recipe.unread_bytes == beside
    weights = LINEAR_WEIGHTS + FLOAT_WEIGHTS + V * D
    assert recipe.weight_bits.read == pytest.approx(8 * read / weights, rel=1e-12)
    stored = 8 * (read + beside) / (weights if tied else weights + V * D)
    assert recipe.weight_bits.stored == pytest.approx(stored, rel=1e-12)


@pytest.mark.parametrize("pattern", ["nowhere_proj", "lm_head", "router", "weight", "bias"])
def test_a_pattern_that_names_no_linear_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match=rf"executorch\.quantization\.keep_int8: got '{pattern}'; expected a part of"):
        recipe_of(quantized(linear="int4", keep_int8=("down_proj", pattern)))
    recipe_of(quantized(head="int8", keep_int8=(pattern,)))  # nothing to keep it from


@pytest.mark.parametrize("options", [CoreMLOptions, CoreAIOptions])
def test_a_pattern_that_names_no_matrix_is_refused_unless_it_is_the_default(options: Any) -> None:
    shapes = {EMBEDDING: (V, D), "layers.0.mixer.in_proj.weight": (3 * D, D)}  # neither v_proj nor down_proj
    assert not recipe_of(options(weights="int4"), True, shapes).is_float32
    owner = options.__name__.removesuffix("Options").lower()
    with pytest.raises(ConfigError, match=rf"{owner}\.keep_int8: got 'v_proj'; expected a part of a matrix's name"):
        recipe_of(options(weights="int4", keep_int8=("v_proj",)), True, shapes)
    recipe_of(options(weights="int4", keep_int8=("lm_head",)), True, shapes)


def test_a_preset_may_name_what_a_model_has_not() -> None:
    shapes = {EMBEDDING: (V, D), "layers.0.mixer.in_proj.weight": (3 * D, D)}
    assert form(recipe_of(ExecutorchOptions(quantization=PRESETS["small"]), True, shapes).part(
        "layers.0.mixer.in_proj.weight")) == "int4/32 bfloat16 gptq"  # fmt: skip
    mapping = PRESETS["small"].model_dump() | {"group_size": 64}
    with pytest.raises(ConfigError, match="keep_int8: got 'down_proj'"):
        recipe_of(quantized(**mapping), True, shapes)


@pytest.mark.parametrize(
    ("rules", "name"),
    [
        ({"linear": "int4"}, r"layers\.0\.mixer\.q_proj"),
        ({"embedding": "int4"}, "embedding"),
        ({"head": "int4"}, "lm_head"),
    ],
)
def test_a_group_that_does_not_divide_is_refused(rules: dict[str, str], name: str) -> None:
    match = rf"executorch\.quantization\.group_size: got 128 for {name} with 64 input channels"
    with pytest.raises(ConfigError, match=match):
        recipe_of(quantized(**rules, group_size=128))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (quantized(linear="palettized4"), r"executorch\.quantization\.linear: got 'palettized4'; .*: int4, int8\."),
        (quantized(embedding="int4_shifted"), r"executorch\.quantization\.embedding: got 'int4_shifted'"),
        (
            CoreMLOptions(weights="int4_shifted"),
            r"coreml\.weights: got .*: float16, int4, int8, int8_grouped, palettized4\.",
        ),
        (
            CoreAIOptions(weights="palettized4"),
            r"coreai\.weights: got .*: float16, int4, int4_shifted, int8, int8_grouped\.",
        ),
    ],
)
def test_a_grid_that_a_format_does_not_carry_is_refused(options: FormatOptions, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        recipe_of(options)


def test_options_bring_the_default_of_their_weights() -> None:
    assert CoreMLOptions(weights="palettized4").keep_int8 == CoreAIOptions(weights="int4").keep_int8 == SENSITIVE
    assert CoreMLOptions().keep_int8 == CoreAIOptions(weights="int8").keep_int8 == ()
    assert CoreAIOptions(weights="int4", keep_int8=()).keep_int8 == ()
    with pytest.raises(ValueError, match="keep_int8 beside weights of fewer bits than int8, not int8"):
        CoreMLOptions(weights="int8", keep_int8=("v_proj",))


def test_a_grid_is_called_as_its_file_is() -> None:
    assert names() == ("float16", "float32", "int4", "int4_shifted", "int8", "int8_grouped", "palettized4")
    assert all(grid(name).name == name for name in names())
    assert "exporter.grids.base" in sys.modules and "base" not in names()
