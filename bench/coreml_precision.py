"""The cost of each choice of `backends.coreml.precision` in logits: the table of docs/coreml.md.

``python bench/coreml_precision.py configs/gemma3_270m.yaml tokenizer.json``: the decoder with the casts of the
package, run eagerly in torch, against the float32 one. 700 tokens of English: a chunk of 512, one of 180, then singles.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from exporter.backends.coreml.precision import FLOAT32, SHIPPED, Precision, in_precision
from exporter.cache.plain import PlainKernels
from exporter.checkpoint import Checkpoint
from exporter.config import load_config
from exporter.english import english_ids
from exporter.model.decoder import Decoder
from exporter.progress import Progress
from exporter.quiet import quieten_libraries
from exporter.source import open_source, read_decoder
from exporter.spec import CachePolicy, TokenizerSpec, state_specs

CONTEXT, TOKENS, ONE_BY_ONE = 2048, 700, 8
HALF, FLOAT = torch.float16, torch.float32
CASES = {
    "float32, states in float16": FLOAT32,
    "all float16": Precision(HALF, HALF, HALF, HALF, HALF),
    "norms in float32": Precision(HALF, FLOAT, HALF, HALF, HALF),
    "norms and softmax": Precision(HALF, FLOAT, FLOAT, HALF, HALF),
    "residual": Precision(HALF, HALF, HALF, FLOAT, HALF),
    "norms and residual (shipped)": SHIPPED,
    "norms, residual, softmax": Precision(HALF, FLOAT, FLOAT, FLOAT, HALF),
    "norms, residual, softmax, rotation": Precision(HALF, FLOAT, FLOAT, FLOAT, FLOAT),
}


def play(decoder: Decoder, ids: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Logits ``[T, V]`` of every token."""
    states = [torch.zeros(state.shape(), dtype=dtype) for state in decoder.states]
    offset, rows = 0, []
    for length in (512, TOKENS - 512 - ONE_BY_ONE, *[1] * ONE_BY_ONE):
        chunk = torch.tensor([ids[offset : offset + length]])
        offset += length
        with torch.no_grad():
            hidden = decoder.hidden_states(chunk, torch.zeros(1, offset, dtype=torch.int64), states, length == 1)
            rows.append(decoder.logits(hidden).float()[0])
    return torch.cat(rows)


def decoder_of(checkpoint: Checkpoint, config: Path, progress: Progress) -> Decoder:
    source = open_source(load_config(config))
    states = state_specs(checkpoint.spec, CachePolicy(), CONTEXT, "static", "float16")
    return read_decoder(source, states, PlainKernels(), progress)


def main(config: Path, tokenizer: Path) -> None:
    quieten_libraries()
    checkpoint = open_source(load_config(config)).checkpoint
    ids = english_ids(
        tokenizer, TokenizerSpec(bos_token_id=2, eos_token_ids=(1,), add_bos=True, has_chat_template=False), TOKENS
    )
    decoder = decoder_of(checkpoint, config, Progress.silent())
    want = play(decoder, ids, FLOAT)
    targets = torch.tensor(ids[1:])
    print(f"float32: NLL {torch.nn.functional.cross_entropy(want[:-1], targets):.4f}")
    print("| in float32 | largest | mean | KL | argmax | NLL |\n|---|---|---|---|---|---|")
    for name, precision in CASES.items():
        got = play(in_precision(decoder, precision), ids, HALF)
        difference = (got - want).abs()
        p, q = want.log_softmax(-1), got.log_softmax(-1)
        divergence = float((p.exp() * (p - q)).sum(-1).mean())
        agreed = float((got.argmax(-1) == want.argmax(-1)).float().mean())
        nll = float(torch.nn.functional.cross_entropy(got[:-1], targets))
        columns = f"{difference.max():.3g} | {difference.mean():.2g} | {divergence:.1e} | {agreed:.1%} | {nll:.4f}"
        print(f"| {name} | {columns} |", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
