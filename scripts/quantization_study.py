"""What quantising this or that costs: the eager decoder's NLL on English text, one line a variant.

Nothing is exported: ``python scripts/quantization_study.py configs/gemma3_270m.yaml`` takes minutes.
"""

from __future__ import annotations

import copy
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from exporter import pipeline
from exporter.cache.plain import PlainKernels
from exporter.config import load_config
from exporter.english import english_ids
from exporter.model.decoder import Decoder
from exporter.progress import Progress
from exporter.quantization import grids, quantize
from exporter.quantization.bits import weight_bits
from exporter.quantization.calibration import calibration_ids
from exporter.quiet import quieten_libraries
from exporter.spec import PRESETS, QuantizationSpec, StateSpec
from exporter.tokenizer import write_tokenizer

TOKENS, CHUNK = 1500, 500
INT8 = {"linear": "int8", "embedding": "int8", "head": "int8"}
FOUR = {"embedding": "int8", "head": "int4", "smooth": True, "rounding": "gptq"}
VARIANTS: dict[str, QuantizationSpec] = {
    "**accurate**: int8 everywhere, smoothed": PRESETS["accurate"],
    "**balanced**: int8, head int4 GPTQ but 32768 rows, smoothed": PRESETS["balanced"],
    "**small**: int4 GPTQ, v_proj and down_proj int8, smoothed": PRESETS["small"],
    "int8 linears": QuantizationSpec(linear="int8"),
    "int8 linears, smoothed": QuantizationSpec(linear="int8", smooth=True),
    "int8 head": QuantizationSpec(head="int8"),
    "int8 head, smoothed": QuantizationSpec(head="int8", smooth=True),
    "int8 everywhere": QuantizationSpec(**INT8),
    "int4 head, nearest": QuantizationSpec(head="int4"),
    "int4 head, GPTQ, smoothed": QuantizationSpec(head="int4", rounding="gptq", smooth=True),
    "int4 head and embedding, GPTQ, smoothed": QuantizationSpec(
        head="int4", embedding="int4", rounding="gptq", smooth=True
    ),
    "balanced without int8 rows of the head": QuantizationSpec(linear="int8", **FOUR),
    "small, down_proj int4 too": QuantizationSpec(linear="int4", keep_int8=("v_proj",), **FOUR),
    "small, nearest": QuantizationSpec(
        linear="int4", embedding="int8", head="int4", keep_int8=("down_proj", "v_proj"), smooth=True
    ),
    "small, not smoothed": QuantizationSpec(
        linear="int4", embedding="int8", head="int4", keep_int8=("down_proj", "v_proj"), rounding="gptq"
    ),
}


@torch.no_grad()
def nll(decoder: Decoder, states: tuple[StateSpec, ...], ids: torch.Tensor) -> float:
    """Mean negative log-likelihood of ``ids [1, T]``, every token after the first, in nats."""
    tensors = [torch.zeros(state.shape(TOKENS if state.kind == "full" else None)) for state in states]
    total = 0.0
    for start in range(0, TOKENS, CHUNK):
        seq_len = min(start + CHUNK, TOKENS)
        hidden = decoder.hidden_states(ids[:, start:seq_len], torch.arange(seq_len)[None], tensors, False)
        targets = ids[0, start + 1 : seq_len + 1]
        rows = decoder.logits(hidden)[0, : len(targets)]
        total += float(torch.nn.functional.cross_entropy(rows, targets, reduction="none").double().sum())
    return total / (TOKENS - 1)


def round_weights(decoder: Decoder) -> None:
    """Put every linear's weights on the int8 grid and leave activations alone."""
    for name, module in decoder.named_modules():
        if isinstance(module, torch.nn.Linear) and name.startswith("layers."):
            codes, scales = grids.int8_per_row(module.weight)
            module.weight = torch.nn.Parameter(codes * scales[:, None], requires_grad=False)


def main(model: Annotated[Path, typer.Argument(help="The YAML of an export.")]) -> None:
    """Print a row of the table for every variant: NLL, its difference from float32, bits a weight that a token reads
    and that the file stores, CPU seconds of quantising."""
    quieten_libraries()
    source = pipeline.open_source(load_config(model))
    states = source.states("executorch")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_tokenizer(source.checkpoint, Path(folder))
        ids = torch.tensor([english_ids(Path(folder) / "tokenizer.json", tokenizer, TOKENS)])
        calibration = calibration_ids(Path(folder), tokenizer, source.limits.max_context_length)
    original = pipeline.read_decoder(source, states, PlainKernels(), Progress.silent())
    base = nll(original, states, ids)
    print(f"| float32 | {base:.4f} | | 32, 32 | |", flush=True)
    rounded = copy.deepcopy(original)
    round_weights(rounded)
    value = nll(rounded, states, ids)
    print(f"| int8 linears, activations float | {value:.4f} | {value - base:+.4f} | | |", flush=True)
    for name, spec in VARIANTS.items():
        decoder = copy.deepcopy(original)  # smoothing works in place
        start = time.process_time()
        quantize(decoder, spec, calibration)
        seconds = time.process_time() - start
        value, bits = nll(decoder, states, ids), weight_bits(decoder)
        print(
            f"| {name} | {value:.4f} | {value - base:+.4f} | {bits.read:.2f}, {bits.stored:.2f} | {seconds:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    typer.run(main)
