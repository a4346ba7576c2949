"""The cost of quantisation: the eager decoder's KL divergence from the float one and its NLL on English text, a line
per variant.

Nothing is exported: ``python bench/quantization_study.py configs/gemma3_270m.yaml`` takes half an hour of one CPU.
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
from exporter.backends.executorch.options import ExecutorchOptions
from exporter.cache.plain import PlainKernels
from exporter.config import load_config
from exporter.english import english_ids, english_text
from exporter.grids.int8 import int8_per_row
from exporter.model.decoder import Decoder, parameter_shapes
from exporter.progress import Progress
from exporter.quantization import quantize
from exporter.quantization.calibration import calibration_ids
from exporter.quiet import quieten_libraries
from exporter.spec import PRESETS, QuantizationSpec, StateSpec, TokenizerSpec
from exporter.tokenizer import write_tokenizer

PASSAGES, LENGTH, CHUNK = 8, 1024, 512
EVERY, ROWS = 2, 256  # positions scored, and at a time: a row of float32 logits may be a megabyte
BALANCED, SMALL = PRESETS["balanced"], PRESETS["small"]
VARIANTS: dict[str, QuantizationSpec] = {
    "**accurate**": PRESETS["accurate"],
    "**balanced**": BALANCED,
    "**small**": SMALL,
    "balanced, q_proj int4": BALANCED.model_copy(
        update={"linear": "int4", "keep_int8": ("k_proj", "v_proj", "o_proj", "feed_forward")}
    ),
    "balanced, 32,768 rows of the head int8": BALANCED.model_copy(update={"head_int8_rows": 32768}),
    "balanced, no row of the head int8": BALANCED.model_copy(update={"head_int8_rows": 0}),
    "int8 everywhere, without scaling and GPTQ": QuantizationSpec(linear="int8", embedding="int8", head="int8"),
    "small, k_proj int4": SMALL.model_copy(update={"keep_int8": ("down_proj", "v_proj")}),
    "small, nearest": SMALL.model_copy(update={"rounding": "nearest"}),
}


def passages(folder: Path, tokenizer: TokenizerSpec) -> list[torch.Tensor]:
    """`PASSAGES` of the text, int64 ``[1, LENGTH + 1]`` each, evenly apart and each after BOS where the model wants
    one. The calibration text has none of their paragraphs."""
    every = english_ids(folder / "tokenizer.json", tokenizer, len(english_text()))
    bos = every[: int(tokenizer.add_bos)]
    text = every[len(bos) :]
    starts = range(0, len(text) - LENGTH, (len(text) - LENGTH) // PASSAGES)[:PASSAGES]
    return [torch.tensor([(bos + text[start : start + LENGTH + 1])[: LENGTH + 1]]) for start in starts]


@torch.no_grad()
def last_hidden(decoder: Decoder, states: tuple[StateSpec, ...], ids: torch.Tensor) -> torch.Tensor:
    """Of every `EVERY`-th position of a passage, ``[1, LENGTH / EVERY, D]``."""
    tensors = [torch.zeros(state.shape(LENGTH if state.kind == "full" else None)) for state in states]
    parts = [
        decoder.hidden_states(
            ids[:, start : start + CHUNK], torch.arange(start + CHUNK)[None], tensors, write_first=False
        )
        for start in range(0, LENGTH, CHUNK)
    ]
    return torch.cat(parts, 1)[:, ::EVERY]


@torch.no_grad()
def compare(
    decoder: Decoder, original: Decoder, states: tuple[StateSpec, ...], texts: list[torch.Tensor],
    expected: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Position by position, float64 ``[n]``: the KL divergence of `decoder` from the float `original`, the difference
    of their negative log-likelihoods, and that of `original` itself. `expected` is its `last_hidden`."""
    columns = []
    for ids, floats in zip(texts, expected, strict=True):
        own, true = last_hidden(decoder, states, ids), ids[0, 1::EVERY]
        for rows in (slice(start, start + ROWS) for start in range(0, len(true), ROWS)):
            want = torch.log_softmax(original.logits(floats[:, rows])[0], -1)
            got = torch.log_softmax(decoder.logits(own[:, rows])[0], -1)
            target = true[rows, None]
            likelihood, difference = -want.gather(1, target), want.gather(1, target) - got.gather(1, target)
            divergence = torch.sub(want, got, out=got).mul_(want.exp_()).sum(1)
            columns.append(torch.stack([divergence, difference[:, 0], likelihood[:, 0]]).double())
    divergence, difference, likelihood = torch.cat(columns, 1)
    return divergence, difference, likelihood


def mean_and_error(values: torch.Tensor) -> tuple[float, float]:
    """The mean of ``[n]`` and its standard error."""
    return float(values.mean()), float(values.std() / len(values) ** 0.5)


def round_weights(decoder: Decoder) -> None:
    """Put every linear's weights on the int8 grid and leave activations alone."""
    for name, module in decoder.named_modules():
        if isinstance(module, torch.nn.Linear) and name.startswith("layers."):
            codes, scales = int8_per_row(module.weight)
            module.weight = torch.nn.Parameter(codes * scales[:, None], requires_grad=False)


def main(model: Annotated[Path, typer.Argument(help="The YAML of an export.")]) -> None:
    """Print a row of the table for every variant: KL divergence from float32 and difference of NLL, each with its
    standard error, bits a weight that a token reads and that the file stores, CPU seconds of quantising."""
    quieten_libraries()
    source = pipeline.open_source(load_config(model))
    states = source.states("executorch")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_tokenizer(source.checkpoint, Path(folder))
        texts = passages(Path(folder), tokenizer)
        calibration = calibration_ids(Path(folder), tokenizer, source.limits.max_context_length)
    original = pipeline.read_decoder(source, states, PlainKernels(), Progress.silent())
    expected = [last_hidden(original, states, ids) for ids in texts]

    def row(name: str, decoder: Decoder, rest: str) -> None:
        divergences, differences, likelihoods = compare(decoder, original, states, texts, expected)
        (kl, kl_error), (nll, nll_error) = mean_and_error(divergences), mean_and_error(differences)
        if decoder is rounded:
            print(f"float32: NLL {likelihoods.mean():.4f} at {len(likelihoods)} positions", flush=True)
        print(f"| {name} | {kl:.4f} ± {kl_error:.4f} | {nll:+.4f} ± {nll_error:.4f} | {rest} |", flush=True)

    rounded = copy.deepcopy(original)
    round_weights(rounded)
    row("int8 weights of linears, without scaling and GPTQ, activations float", rounded, " | ")
    for name, spec in VARIANTS.items():
        decoder = copy.deepcopy(original)  # smoothing works in place
        tied = decoder.spec.tie_word_embeddings
        recipe = ExecutorchOptions(quantization=spec).recipe(parameter_shapes(decoder.spec), tied)
        start = time.process_time()
        quantize(decoder, recipe, calibration)
        seconds, bits = time.process_time() - start, recipe.weight_bits
        row(name, decoder, f"{bits.read:.2f}, {bits.stored:.2f} | {seconds:.0f}")


if __name__ == "__main__":
    typer.run(main)
