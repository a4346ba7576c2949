"""What quantisation costs on every kind of text: the eager decoder beside the float one, a line per variant.

Nothing is exported: ``python bench/quantization_study.py configs/gemma3_270m.yaml`` takes a few minutes a variant.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from exporter.backends.executorch.options import ExecutorchOptions
from exporter.cache.plain import PlainKernels
from exporter.config import load_config
from exporter.model.decoder import Decoder, all_read, parameter_shapes
from exporter.progress import Progress
from exporter.quality.domains import DOMAINS, Passage, passages_of
from exporter.quality.scores import DomainScores
from exporter.quantization import quantize
from exporter.quantization.passages import calibration
from exporter.quiet import quieten_libraries
from exporter.source import open_source, read_decoder
from exporter.spec import PRESETS, DomainScore, QuantizationSpec
from exporter.text.encoder import Encoder
from exporter.tokenizer import write_tokenizer
from exporter.verification.quality import logits_by_layers

VARIANTS: dict[str, QuantizationSpec] = {
    "**accurate**": PRESETS["accurate"],
    "**balanced**": PRESETS["balanced"],
    "**small**": PRESETS["small"],
    "int8 everywhere, without scaling and GPTQ": QuantizationSpec(linear="int8", embedding="int8", head="int8"),
}
Texts = Mapping[str, Sequence[Passage]]


def scores(decoder: Decoder, original: Decoder, texts: Texts) -> list[DomainScore]:
    """Each domain's."""
    found = []
    for name, passages in texts.items():
        own = DomainScores(name)
        ours, theirs = (logits_by_layers(model, passages, all_read) for model in (decoder, original))
        following = torch.tensor([token for one in passages for token in one.ids[one.first :]])
        start = 0
        for got, want in zip(ours, theirs, strict=True):
            own.add(want, got, following[start : start + len(got)])
            start += len(got)
        found.append(own.score())
    return found


def main(
    model: Annotated[Path, typer.Argument(help="The YAML of an export.")],
    positions: Annotated[int, typer.Option(help="Tokens to score of each text.")] = 256,
    only: Annotated[list[str] | None, typer.Option(help="These variants alone.")] = None,
) -> None:
    """Print a row for every variant: mean and worst KL divergence from float32 and the worst difference of NLL over the
    texts, with its standard error; bits a weight that a token reads and that the file stores; CPU seconds of
    quantising."""
    quieten_libraries()
    source = open_source(load_config(model))
    with tempfile.TemporaryDirectory() as folder:
        encoder = Encoder(Path(folder), write_tokenizer(source.checkpoint, Path(folder)))
        context = source.limits.max_context_length
        texts = {domain.name: passages_of(domain, encoder, positions, context) for domain in DOMAINS}
        texts = {name: own for name, own in texts.items() if own}
        calibrating = calibration(encoder, context).passages
    original = read_decoder(source, source.states("executorch"), PlainKernels(), Progress.silent())
    shapes, tied = parameter_shapes(original.spec), original.spec.tie_word_embeddings
    for name, spec in VARIANTS.items():
        if only and name.strip("*") not in only:
            continue
        decoder = copy.deepcopy(original)  # smoothing works in place
        recipe = ExecutorchOptions(quantization=spec).recipe(shapes, tied)
        start = time.process_time()
        quantize(decoder, recipe, calibrating)
        seconds, bits = time.process_time() - start, recipe.weight_bits
        found = scores(decoder, original, texts)
        worst, gap = max(found, key=lambda one: one.kl), max(found, key=lambda one: one.nll_gap)
        mean = sum(one.kl for one in found) / len(found)
        print(
            f"| {name} | {mean:.4f} | {worst.kl:.4f} ± {worst.kl_error:.4f}, {worst.domain} | "
            f"{gap.nll_gap:+.4f} ± {gap.nll_gap_error:.4f}, {gap.domain} | {bits.read:.2f}, {bits.stored:.2f} | "
            f"{seconds:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    typer.run(main)
