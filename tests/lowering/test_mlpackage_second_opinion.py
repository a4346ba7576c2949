"""The kernels against coremltools' own constant folding, which is other code: random arguments, one saved package.

The package is built with coremltools' builder, saved by it, opened and evaluated by us; beside it coremltools folds the
same operators over constants. (Its folder ignores `interleave` of concat, against its own documentation, and folds
exclusive sums with an error; those have their tests elsewhere.)
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from exporter.backends.coreml.evaluator import load_functions

if importlib.util.find_spec("coremltools") is None:
    pytest.skip("coremltools is not installed", allow_module_level=True)

import coremltools as ct
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Program, types

generator = np.random.default_rng(11)
X = generator.standard_normal((3, 4, 5)).astype(np.float32)
Y = generator.standard_normal((3, 1, 5)).astype(np.float32)
WHOLE = generator.integers(-9, 10, (3, 4, 5)).astype(np.int32)
DIVISOR = np.array([1, 2, -3, 4, -5], np.int32)

CASES: dict[str, tuple[dict[str, np.ndarray], Callable[..., Any]]] = {
    "arithmetic": ({"x": X, "y": Y}, lambda x, y: mb.real_div(x=mb.sub(x=mb.mul(x=x, y=y), y=mb.add(x=x, y=y)), y=y)),
    "extremes": ({"x": X, "y": Y}, lambda x, y: mb.minimum(x=mb.maximum(x=x, y=y), y=np.float32(0.5))),
    "floor_div": ({"x": WHOLE, "y": DIVISOR}, lambda x, y: mb.floor_div(x=x, y=y)),
    "mod": ({"x": WHOLE, "y": DIVISOR}, lambda x, y: mb.mod(x=x, y=y)),
    "compare and select": ({"x": X, "y": Y}, lambda x, y: mb.select(cond=mb.less_equal(x=x, y=y), a=x, b=mb.exp(x=x))),
    "trigonometry": ({"x": X}, lambda x: mb.concat(values=[mb.cos(x=x), mb.sin(x=x), mb.tanh(x=x)], axis=1)),
    "rsqrt": ({"x": X}, lambda x: mb.rsqrt(x=mb.square(x=x), epsilon=1e-3)),
    "cast": ({"x": X * 5}, lambda x: mb.cast(x=x, dtype="int32")),
    "round": ({"x": WHOLE.astype(np.float32) / 2}, lambda x: mb.round(x=x)),
    "gelu": ({"x": X}, lambda x: mb.gelu(x=x, mode="TANH_APPROXIMATION")),
    "gelu exact": ({"x": X}, lambda x: mb.gelu(x=x, mode="EXACT")),
    "sigmoid": ({"x": X}, lambda x: mb.sigmoid(x=x)),
    "softplus": ({"x": X}, lambda x: mb.softplus(x=x)),
    "softmax": ({"x": X}, lambda x: mb.softmax(x=x, axis=1)),
    "layer_norm": ({"x": X}, lambda x: mb.layer_norm(x=x, axes=[-1], gamma=Y[0, 0], epsilon=1e-3)),
    "means": ({"x": X}, lambda x: mb.reduce_mean(x=x, axes=[0, -1], keep_dims=True)),
    "sums": ({"x": X}, lambda x: mb.reduce_sum(x=x, axes=[1], keep_dims=False)),
    "argmax": ({"x": X}, lambda x: mb.reduce_argmax(x=x, axis=1)),
    "log_sum_exp": ({"x": X}, lambda x: mb.reduce_log_sum_exp(x=x, axes=[2], keep_dims=True)),
    "cumsum": ({"x": X}, lambda x: mb.cumsum(x=x, axis=1, reverse=True)),
    "topk": ({"x": X}, lambda x: mb.topk(x=x, k=2, axis=-1)[0]),
    "slices": ({"x": X}, lambda x: mb.slice_by_index(x=x, begin=[-2, 3, 0], end=[3, 0, -1], stride=[1, -1, 2])),
    "indexed": (
        {"x": X},
        lambda x: mb.slice_by_index(x=x, begin=[1, -1, 0], end=[0, 0, 0], end_mask=[False, False, True],
                                    squeeze_mask=[True, False, False], begin_mask=[False, True, False]),
    ),
    "by size": ({"x": X}, lambda x: mb.slice_by_size(x=x, begin=[0, 1, 2], size=[2, -1, 1])),
    "update": ({"x": X, "y": Y}, lambda x, y: mb.slice_update(x=x, update=y, begin=[0, 2, 0], end=[3, 3, 5])),
    "gather": ({"x": X}, lambda x: mb.gather(x=x, indices=np.array([[3, 0], [1, 2]], np.int32), axis=1)),
    "batched gather": (
        {"x": X}, lambda x: mb.gather(x=x, indices=np.array([[3], [0], [1]], np.int32), axis=1, batch_dims=1)
    ),
    "along axis": ({"x": X}, lambda x: mb.gather_along_axis(x=x, indices=np.abs(WHOLE) % 4, axis=1)),
    "reshape": ({"x": X}, lambda x: mb.reshape(x=x, shape=[0, -1])),
    "moves": (
        {"x": X},
        lambda x: mb.squeeze(x=mb.expand_dims(x=mb.transpose(x=x, perm=[2, 0, 1]), axes=[1]), axes=[1]),
    ),
    "tile": ({"x": X}, lambda x: mb.tile(x=x, reps=[1, 2, 3])),
    "concat": ({"x": X, "y": Y}, lambda x, y: mb.concat(values=[x, y], axis=1)),
    "stack": ({"x": X}, lambda x: mb.stack(values=[x, mb.relu(x=x)], axis=1)),
    "band": ({"x": X}, lambda x: mb.band_part(x=x, lower=1, upper=0)),
    "pad": ({"x": X}, lambda x: mb.pad(x=x, pad=[1, 2, 0, 1], mode="reflect")),
    "matmul": ({"x": X, "y": Y}, lambda x, y: mb.matmul(x=x, y=y, transpose_y=True)),
    "linear": ({"x": X}, lambda x: mb.linear(x=x, weight=X[0], bias=X[1, :, 0])),
    "attention": (
        {"x": X, "y": X[:, :3, ::-1].copy()},
        lambda x, y: mb.scaled_dot_product_attention(query=x, key=y, value=y, attn_mask=WHOLE[0, :, :3] > -7),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """The result of every case, all of them operators of one package whose inputs are the arguments."""
    arrays = {f"{name}_{key}".replace(" ", "_"): array for name, (arguments, _) in CASES.items()
              for key, array in arguments.items()}  # fmt: skip
    placeholders = {
        name: mb.placeholder(shape=array.shape, dtype=types.int32 if array.dtype == np.int32 else types.fp32)
        for name, array in arrays.items()
    }
    program, names = Program(), {}
    with Function(placeholders, opset_version=ct.target.iOS18) as function:
        for name, (arguments, body) in CASES.items():
            given = [function.inputs[f"{name}_{key}".replace(" ", "_")] for key in arguments]
            names[name] = f"result_{len(names)}"
            mb.identity(x=body(*given), name=names[name])
        results = [op.outputs[0] for op in function.operations if op.outputs[0].name in names.values()]
        function.set_outputs(results)
    program.add_function("main", function)
    # No pass may simplify what is to be evaluated.
    model = ct.convert(program, source="milinternal", convert_to="mlprogram", minimum_deployment_target=ct.target.iOS18,
                       compute_precision=ct.precision.FLOAT32, pass_pipeline=ct.PassPipeline.EMPTY,
                       skip_model_load=True)  # fmt: skip
    path = tmp_path_factory.mktemp("opinion") / "p.mlpackage"
    model.save(str(path))
    inputs = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    found = load_functions(path)["main"].run(inputs, {})
    return {name: found[own].numpy() for name, own in names.items()}


def folded(arguments: dict[str, np.ndarray], body: Callable[..., Any]) -> np.ndarray:
    """The result of `body` as coremltools folds it over constants."""
    with Function({}, opset_version=ct.target.iOS18) as function:
        program = Program()
        program.add_function("main", function)
        constants = [mb.const(val=value) for value in arguments.values()]
        return np.asarray(body(*constants).val)


@pytest.mark.parametrize("name", CASES)
def test_the_folder_agrees(name: str, evaluated: dict[str, np.ndarray]) -> None:
    theirs = folded(*CASES[name])
    assert evaluated[name].shape == theirs.shape
    np.testing.assert_allclose(evaluated[name], theirs, rtol=1e-5, atol=1e-6)
