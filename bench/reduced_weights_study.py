"""What the rounding of the weights alone costs in Apple's formats: the tables of docs/coreml.md and docs/coreai.md.

``python bench/reduced_weights_study.py configs/gemma3_270m.yaml``: the float32 decoder with every matrix replaced by
what the file would stand for, against itself, over 700 tokens of English. Nothing is exported; it takes minutes.
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
from exporter.quantization.matrices import BLOCK, Storage, grids_of
from exporter.quantization.palettes import ENTRIES
from exporter.quantization.rounding import round_weights
from exporter.quiet import quieten_libraries
from exporter.spec import KEEP_INT8
from exporter.tokenizer import write_tokenizer

TOKENS, ROWS = 700, 100
TABLES = ("embed_tokens", "lm_head")
KEPT: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "v_proj": ("v_proj",),
    "v_proj, down_proj": ("v_proj", "down_proj"),
    "embedding and head": TABLES,
    "embedding, head, v_proj": (*TABLES, "v_proj"),
    "these and down_proj": (*TABLES, "v_proj", "down_proj"),
}


def storages() -> list[tuple[str, Storage]]:
    found = [(f"{format} int8", Storage(format, "int8")) for format in ("coreml", "coreai")]  # type: ignore[arg-type]
    for format, weights in (("coreml", "int4"), ("coreml", "palettized4"), ("coreai", "int4")):
        for name, kept in KEPT.items():
            shown = f"{format} {weights}, int8: {name}" + (" (default)" if kept == KEEP_INT8[weights] else "")
            found.append((shown, Storage(format, weights, kept)))  # type: ignore[arg-type]
    return found


def megabytes(decoder: Decoder, storage: Storage) -> float:
    """What the matrices take in the file: codes, scales, zero points and palettes."""
    scale, total, parameters = {"coreml": 2, "coreai": 4}[storage.format], 0.0, dict(decoder.named_parameters())
    for name, grid in grids_of(decoder, storage).items():
        if name in parameters:  # a tied one is there once
            rows, columns = parameters[name].shape
            groups = columns // BLOCK
            row = {
                "int8": columns + scale, "int4": columns / 2 + groups * scale,
                "int4_shifted": columns / 2 + groups * (scale + 0.5), "palettized4": columns / 2 + ENTRIES * scale,
            }[grid]  # fmt: skip
            total += rows * row
    return total / 1e6


@torch.no_grad()
def logits_of(decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:
    """Logits ``[TOKENS, V]``."""
    states = [torch.zeros(state.shape(TOKENS if state.kind == "full" else None)) for state in decoder.states]
    hidden = decoder.hidden_states(ids, torch.arange(TOKENS)[None], states, False)
    return decoder.logits(hidden)[0]


def compared(got: torch.Tensor, want: torch.Tensor, ids: torch.Tensor) -> str:
    """Mean difference of logits, KL divergence from `want`, agreement of the best token, NLL."""
    difference = divergence = agreed = loss = 0.0
    for start in range(0, TOKENS, ROWS):
        part = slice(start, start + ROWS)
        ours, theirs = torch.log_softmax(got[part].double(), -1), torch.log_softmax(want[part].double(), -1)
        difference += float((got[part] - want[part]).abs().sum(dtype=torch.float64))
        divergence += float((theirs.exp() * (theirs - ours)).sum())
        agreed += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        targets = ids[0, start + 1 : start + ROWS + 1]
        loss -= float(ours[: len(targets)].gather(1, targets[:, None]).sum())
    mean, nll = difference / got.numel(), loss / (TOKENS - 1)
    return f"{mean:.2f} | {divergence / TOKENS:.4f} | {agreed / TOKENS:.1%} | {nll:.4f}"


def main(model: Annotated[Path, typer.Argument(help="The YAML of an export.")]) -> None:
    """Print a row of the tables for every storage."""
    quieten_libraries()
    source = pipeline.open_source(load_config(model))
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_tokenizer(source.checkpoint, Path(folder))
        ids = torch.tensor([english_ids(Path(folder) / "tokenizer.json", tokenizer, TOKENS)])
    original = pipeline.read_decoder(source, source.states("executorch"), PlainKernels(), Progress.silent())
    want = logits_of(original, ids)
    print("| weights | MB | mean difference of logits | KL | argmax | NLL |")
    print(f"| float32 | | {compared(want, want, ids)} |", flush=True)
    for name, storage in storages():
        decoder = original.with_kernels(PlainKernels())
        round_weights(decoder, storage)
        row = compared(logits_of(decoder, ids), want, ids)
        print(f"| {name} | {megabytes(decoder, storage):.1f} | {row} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
