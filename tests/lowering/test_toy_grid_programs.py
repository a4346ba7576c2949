"""Programs of every format whose weights are on grids that are one file each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from recipes import quantize_by, recipe_of
from tiny_models import GLOBAL, SLIDING, call, decoder_of, model, one_thread, randomize, states_of, token_ids  # noqa: F401
from toy_grids import toy_grids  # noqa: F401

from exporter.backends import Program, build_module, runtime_module, traits
from exporter.backends.executorch.lower import lower
from exporter.backends.executorch.runtime import PteProgram
from exporter.cache.plain import PlainKernels
from exporter.model.decoder import Decoder
from exporter.programs import Limits, trace
from exporter.progress import Progress
from exporter.quantization import QuantizedLinear
from exporter.quantization.rounding import round_weights
from exporter.spec import PROGRAMS, CachePolicy, FormatOptions, QuantizationSpec, state_specs

SPEC = model(SLIDING, GLOBAL)
LIMITS = Limits(max_context_length=32, max_prefill_chunk=16)
IDS = token_ids(20)


def decoder_for(format: str, options: FormatOptions) -> Decoder:
    own = traits(format)
    states = state_specs(SPEC, CachePolicy(initial_rows=16), 32, own.layout, own.state_dtype)
    return randomize(Decoder(SPEC, states, build_module(format).kernels(options)))


def program_logits(format: str, decoder: Decoder, options: FormatOptions, folder: Path) -> torch.Tensor:
    """``[V]`` after a prompt and a token, of the program as its back end writes it."""
    built = build_module(format).build(
        decoder, LIMITS, options, recipe_of(SPEC, options), directory=folder, step=Progress.silent().step
    )
    assert built.program.rounded and all(check.passed for check in built.checks)
    return logits_of(runtime_module(format).load(folder / built.program.file, built.program), decoder)


def logits_of(program: Program, decoder: Decoder) -> torch.Tensor:
    states = states_of(decoder)
    program.run("prefill", torch.tensor([IDS[:12]]), torch.arange(12)[None], states)
    return program.run("main", torch.tensor([IDS[12:13]]), torch.arange(13)[None], states)[0]


def eager_logits(decoder: Decoder) -> torch.Tensor:
    plain = decoder.with_kernels(PlainKernels())
    states = states_of(plain)
    call(plain, IDS[:12], 0, states, False)
    return call(plain, IDS[12:13], 12, states, True)


def test_a_pte_holds_their_codes(tmp_path: Path) -> None:
    rules = QuantizationSpec(linear="int6", head="ternary")
    options = traits("executorch").options.model_validate({"quantization": rules})
    decoder = decoder_for("executorch", options)
    floats = eager_logits(decoder)
    quantize_by(rules, decoder)
    expected = eager_logits(decoder)
    codes = [m.weight.numpy().tobytes() for name, m in decoder.named_modules()
             if isinstance(m, QuantizedLinear) and name.startswith("layers.")]  # fmt: skip
    path = tmp_path / "model.pte"
    lower({name: trace(decoder, kind, LIMITS) for name, kind in PROGRAMS.items()}, path)
    got = logits_of(PteProgram(path), decoder)
    assert len(codes) == 2 * 7 and all(own in path.read_bytes() for own in codes)
    assert float((got - expected).norm()) < 0.25 * float((expected - floats).norm())


@pytest.mark.parametrize(("format", "word"), [("coreml", "int6"), ("coreai", "ternary")])
def test_a_program_of_apples_formats_computes_with_what_they_stand_for(format: str, word: str, tmp_path: Path) -> None:
    pytest.importorskip({"coreml": "coremltools", "coreai": "coreai_torch"}[format])
    options = traits(format).options.model_validate({"weights": word, "keep_int8": ["v_proj"]})
    decoder = decoder_for(format, options)
    floats, rounded = eager_logits(decoder), decoder_for(format, options)
    round_weights(rounded, recipe_of(SPEC, options))
    expected = eager_logits(rounded)
    got = program_logits(format, decoder, options, tmp_path)
    assert float((got - expected).norm()) < 0.25 * float((expected - floats).norm())
