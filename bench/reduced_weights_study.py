"""The cost of rounding the weights alone in Apple's formats: the tables of docs/coreml.md and docs/coreai.md.

``python bench/reduced_weights_study.py configs/gemma3_270m.yaml``: the float32 decoder with every matrix replaced by
what the file would stand for, against itself, over 700 tokens of English. Nothing is exported; it takes minutes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer

from exporter.backends.coreai.options import CoreAIOptions
from exporter.backends.coreml.options import CoreMLOptions
from exporter.cache.plain import PlainKernels
from exporter.config import load_config
from exporter.english import english_ids
from exporter.model.decoder import Decoder, parameter_shapes
from exporter.progress import Progress
from exporter.quantization.rounding import round_weights
from exporter.quiet import quieten_libraries
from exporter.source import open_source, read_decoder
from exporter.spec import SENSITIVE, Recipe, ReducedWeights
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


def variants() -> list[tuple[str, ReducedWeights]]:
    found: list[tuple[str, ReducedWeights]] = [
        ("coreml int8", CoreMLOptions(weights="int8")),
        ("coreai int8", CoreAIOptions(weights="int8")),
    ]
    for format, options, weights in (
        ("coreml", CoreMLOptions, "int4"), ("coreml", CoreMLOptions, "palettized4"), ("coreai", CoreAIOptions, "int4"),
    ):  # fmt: skip
        for name, kept in KEPT.items():
            shown = f"{format} {weights}, int8: {name}" + (" (default)" if kept == SENSITIVE else "")
            found.append((shown, options(weights=weights, keep_int8=kept)))
    return found


def megabytes(recipe: Recipe) -> float:
    """What the matrices take in the file: codes, scales, zero points and palettes."""
    matrices = (own for own in recipe.kept if not recipe.is_float(own.parameters[0]))
    return sum(own.bits for own in matrices) / 8e6


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
    """Print a row of the tables for every variant."""
    quieten_libraries()
    source = open_source(load_config(model))
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_tokenizer(source.checkpoint, Path(folder))
        ids = torch.tensor([english_ids(Path(folder) / "tokenizer.json", tokenizer, TOKENS)])
    original = read_decoder(source, source.states("executorch"), PlainKernels(), Progress.silent())
    want = logits_of(original, ids)
    print("| weights | MB | mean difference of logits | KL | argmax | NLL |")
    print(f"| float32 | | {compared(want, want, ids)} |", flush=True)
    shapes, tied = parameter_shapes(original.spec), original.spec.tie_word_embeddings
    for name, options in variants():
        decoder, recipe = original.with_kernels(PlainKernels()), options.recipe(shapes, tied)
        round_weights(decoder, recipe)
        row = compared(logits_of(decoder, ids), want, ids)
        print(f"| {name} | {megabytes(recipe):.1f} | {row} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
