"""Both real models, whole: the traced programs against eager, to the bit. Run by ``make real``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exporter.cache.plain import PlainKernels
from exporter.config import load_config
from exporter.english import english_ids
from exporter.programs import ProgramModule, trace
from exporter.progress import Progress
from exporter.source import open_source, target_decoder
from exporter.spec import PROGRAMS, program_for
from exporter.tokenizer import write_tokenizer

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FLOATS = {"executorch.quantization": "none", "cache.dtype": "float32"}
# 1,560 tokens: more than three windows of 512, with chunks that straddle the ring's end at every turn.
PIECES = [1, 1, 2, 7, 8, 9, 63, 64, 512, 1, 129, 300, 1, 1, 461]


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["executorch", "plain"])
@pytest.mark.parametrize("model", ["gemma3_270m", "smollm2_135m"])
def test_exported_programs_equal_eager_on_logits_and_every_state(model: str, kernels: str, tmp_path: Path) -> None:
    source = open_source(load_config(CONFIGS / f"{model}.yaml", FLOATS))
    decoder = target_decoder(source, "executorch", Progress.silent())
    if kernels == "plain":
        decoder = decoder.with_kernels(PlainKernels())
    tokenizer = write_tokenizer(source.checkpoint, tmp_path)
    ids = torch.tensor([english_ids(tmp_path / "tokenizer.json", tokenizer, sum(PIECES))])
    assert ids.shape[1] == sum(PIECES)
    eager = {name: ProgramModule(decoder, kind) for name, kind in PROGRAMS.items()}
    exported = {name: trace(decoder, kind, source.limits).module() for name, kind in PROGRAMS.items()}
    specs = source.states("executorch")
    states, twins = (
        [torch.zeros(state.shape(2048 if state.kind == "full" else None)) for state in specs] for _ in range(2)
    )
    seq_len = 0
    for piece in PIECES:
        seq_len += piece
        method = program_for(piece).name
        inputs = ids[:, seq_len - piece : seq_len], torch.arange(seq_len)[None]
        with torch.no_grad():
            want, got = eager[method](*inputs, *states), exported[method](*inputs, *twins)
        assert torch.equal(want, got), f"logits after {seq_len} tokens"
    for state, ours, theirs in zip(specs, states, twins, strict=True):
        assert torch.equal(ours, theirs), state.name
