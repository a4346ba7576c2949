"""Whole packages, converted, saved, opened again and evaluated, against the eager decoder over the same float16 states.

81 tokens over windows of 8: every ring wraps ten times; chunks are shorter and longer than the window and straddle the
ring's end; single tokens run before, between and after them.
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
import torch
from oracle import oracle_logits
from recipes import recipe_of
from tiny_models import SPECS, call, one_thread, randomize, states_of, token_ids  # noqa: F401  (a fixture)

from exporter.backends.coreml import build as coreml_build
from exporter.backends.coreml.options import CoreMLOptions
from exporter.backends.coreml.runtime import MLPackageProgram
from exporter.cache.plain import PlainKernels
from exporter.errors import RuntimeLimitError
from exporter.model.decoder import Decoder
from exporter.programs import Limits
from exporter.spec import CachePolicy, state_specs

if importlib.util.find_spec("coremltools") is None:
    pytest.skip("coremltools is not installed", allow_module_level=True)

CONTEXT, CHUNK = 96, 24
Weights = Literal["float32", "float16", "int8"]
SPLITS = [5, 1, 1, 7, 1, 20, 9, 1, 1, 1, 1, 3, 13, 1, 1, 1, 1, 1, 1, 8, 1, 1, 1]


@contextmanager
def silent(name: str) -> Iterator[Callable[[str], object]]:
    yield lambda text: None


def build(name: str, weights: Weights, folder: Path) -> tuple[Decoder, MLPackageProgram]:
    spec = SPECS[name]
    states = state_specs(spec, CachePolicy(), CONTEXT, "static", "float16")
    decoder = randomize(Decoder(spec, states, PlainKernels()))
    limits = Limits(max_context_length=CONTEXT, max_prefill_chunk=CHUNK)
    options = CoreMLOptions(weights=weights)
    recipe = recipe_of(spec, options)
    built = coreml_build.build(decoder, limits, options, recipe, directory=folder, step=silent)
    return decoder, MLPackageProgram(folder / built.program.file, built.program)


def compare(
    decoder: Decoder, program: MLPackageProgram, ids: Sequence[int]
) -> tuple[float, float, dict[int, torch.Tensor]]:
    """The worst differences of logits and of states, and the package's logits by position."""
    theirs, ours = states_of(decoder), states_of(decoder)
    offset, worst, states, logits = 0, 0.0, 0.0, {}
    for length in SPLITS:
        chunk = ids[offset : offset + length]
        offset += length
        want = call(decoder, chunk, offset - length, theirs, length == 1)
        positions = torch.zeros(1, offset, dtype=torch.int64)
        got = program.run("main" if length == 1 else "prefill", torch.tensor([chunk]), positions, ours)[0]
        worst = max(worst, float((got - want).abs().max()))
        states = max(states, *(float((a.float() - b.float()).abs().max()) for a, b in zip(ours, theirs, strict=True)))
        logits[offset - 1] = got
    return worst, states, logits


# The bounds are about twice what was measured, on logits of up to 7. In float32 what remains is a row of state that
# rounds to the neighbouring half (of numbers up to 8: 2^-8); the oracle keeps no halves at all.
@pytest.mark.parametrize(
    ("name", "weights", "logits", "states", "oracle"),
    [
        ("config T", "float32", 1.5e-3, 2.0**-8, 2e-2),
        ("short convolution", "float32", 1e-3, 2.0**-8, 1e-2),
        ("gemma", "float16", 1e-2, 2e-2, 1e-2),
        ("sinks and experts", "float16", 3e-2, 3e-2, 3e-2),
    ],
)
def test_a_package_computes_what_the_decoder_computes(
    name: str, weights: Weights, *, logits: float, states: float, oracle: float, tmp_path: Path
) -> None:
    decoder, program = build(name, weights, tmp_path)
    ids = token_ids(sum(SPLITS))
    worst, rows, got = compare(decoder, program, ids)
    assert worst < logits and rows <= states
    exact = oracle_logits(SPECS[name], dict(decoder.named_parameters()), ids)
    assert max(float((row.double() - exact[place]).abs().max()) for place, row in got.items()) < oracle


def test_an_int8_package_computes_with_its_integers_times_their_scales(tmp_path: Path) -> None:
    decoder, program = build("all sliding", "int8", tmp_path)
    ids = token_ids(sum(SPLITS))
    float_worst, _, _ = compare(decoder, program, ids)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 2:
                halves = parameter.half().float()
                scale = halves.abs().amax(1, keepdim=True) / 127
                parameter.copy_((torch.round(halves / scale) * scale.half().float()).half())
    worst, _, _ = compare(decoder, program, ids)
    assert 4 * worst < float_worst  # what is left is the rounding of float16, not that of the weights
    for chunk, seq_len, words in (
        ([1] * (CHUNK + 1), CHUNK + 1, rf"input_ids \[1, {CHUNK + 1}\]; expected input_ids \[1, 2..{CHUNK}\]"),
        ([1], CONTEXT + 1, rf"position_ids \[1, {CONTEXT + 1}\]; expected position_ids \[1, 1..{CONTEXT}\]"),
    ):
        method = "main" if len(chunk) == 1 else "prefill"
        with pytest.raises(RuntimeLimitError, match=words):
            program.run(method, torch.tensor([chunk]), torch.zeros(1, seq_len, dtype=torch.int64), states_of(decoder))
