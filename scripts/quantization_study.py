"""What quantising this or that costs: the eager decoder's NLL on English text, one line a variant.

Nothing is exported: ``python scripts/quantization_study.py configs/gemma3_270m.yaml`` takes minutes.
"""

from __future__ import annotations

import tempfile
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
from exporter.quiet import quieten_libraries
from exporter.spec import QuantizationSpec, StateSpec
from exporter.tokenizer import write_tokenizer

TOKENS, CHUNK = 1500, 500
TABLES = {"embedding": "int8", "head": "int8"}


def variants(layers: int) -> dict[str, QuantizationSpec]:
    """Name to what is quantised; `layers` names the last layer."""
    edges = ("layers.0.", "layers.1.", f"layers.{layers - 1}.")
    return {
        "int8 linears": QuantizationSpec(linear="int8"),
        "int8 embedding": QuantizationSpec(embedding="int8"),
        "int8 head": QuantizationSpec(head="int8"),
        "int8 everywhere": QuantizationSpec(linear="int8", **TABLES),
        "int4 linears": QuantizationSpec(linear="int4"),
        "int4 linears, int8 tables": QuantizationSpec(linear="int4", **TABLES),
        "int4 everywhere": QuantizationSpec(linear="int4", embedding="int4", head="int4"),
        "int4, down_proj int8": QuantizationSpec(linear="int4", keep_int8=("down_proj",), **TABLES),
        "int4, down_proj and v_proj int8": QuantizationSpec(linear="int4", keep_int8=("down_proj", "v_proj"), **TABLES),
        "int4, attention int8": QuantizationSpec(linear="int4", keep_int8=("mixer",), **TABLES),
        "int4, first two and last layer int8": QuantizationSpec(linear="int4", keep_int8=edges, **TABLES),
        "int4 in groups of 64, down_proj and v_proj int8": QuantizationSpec(
            linear="int4", group_size=64, keep_int8=("down_proj", "v_proj"), **TABLES
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
        total += float(torch.nn.functional.cross_entropy(rows.double(), targets, reduction="sum"))
    return total / (TOKENS - 1)


def round_weights(decoder: Decoder) -> None:
    """Put every linear's weights on the int8 grid and leave activations alone."""
    for name, module in decoder.named_modules():
        if isinstance(module, torch.nn.Linear) and name.startswith("layers."):
            codes, scales = grids.int8_per_row(module.weight)
            module.weight = torch.nn.Parameter(codes * scales[:, None], requires_grad=False)


def main(model: Annotated[Path, typer.Argument(help="The YAML of an export.")]) -> None:
    """Print a row of the table for every variant."""
    quieten_libraries()
    source = pipeline.open_source(load_config(model))
    states = source.states("executorch")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_tokenizer(source.checkpoint, Path(folder))
        ids = torch.tensor([english_ids(Path(folder) / "tokenizer.json", tokenizer, TOKENS)])
    original = pipeline.read_decoder(source, states, PlainKernels(), Progress.silent())
    base = nll(original, states, ids)
    print(f"| float32 | {base:.4f} | |")
    rounded = original.with_kernels(PlainKernels())
    round_weights(rounded)
    value = nll(rounded, states, ids)
    print(f"| int8 linears, activations float | {value:.4f} | {value - base:+.4f} |", flush=True)
    for name, spec in variants(len(source.checkpoint.spec.layers)).items():
        decoder = original.with_kernels(PlainKernels())
        quantize(decoder, spec)
        value = nll(decoder, states, ids)
        print(f"| {name} | {value:.4f} | {value - base:+.4f} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
