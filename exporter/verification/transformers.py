"""The model a bundle is held against: Transformers, in float32, from the same checkpoint.

Letters: V vocab_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from exporter.checkpoint import Checkpoint
from exporter.progress import Detail
from exporter.spec import Comparison, Format
from exporter.verification.compare import TRANSFORMERS, Differences
from runtime_ref.session import Session


class Effort(NamedTuple):
    """What the full form runs: tokens of text, greedy tokens, the chunk lengths the text goes through in.

    The last `tail` tokens of the text go one by one whatever the chunk, and their NLL is taken; 0 takes that of the
    whole text from chunks of 1.
    """

    tokens: int
    greedy: int
    chunks: tuple[int, ...]
    tail: int = 0


# The others are interpreted. Core AI's interpreter takes as long for a token as for a chunk of 61.
EFFORT: dict[Format, Effort] = {
    "executorch": Effort(1500, 64, (1, 7, 64, 128, 512)),
    "coreml": Effort(700, 32, (1, 512)),
    "coreai": Effort(700, 32, (512,), tail=64),
}


class TransformersReference:
    """Logits of the checkpoint by Transformers' own code, its own reading of the file and its own cache."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        import transformers  # a second that an export need not wait for

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        gguf = {"gguf_file": checkpoint.path.name} if checkpoint.kind == "gguf" else {"use_safetensors": True}
        directory = checkpoint.path.parent if checkpoint.kind == "gguf" else checkpoint.path
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            str(directory), dtype=torch.float32, attn_implementation="eager", local_files_only=True, **gguf
        ).eval()

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """float32 ``[len(ids), V]``, in one forward without a cache."""
        return self.model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()

    @torch.no_grad()
    def greedy(self, ids: Sequence[int], count: int) -> tuple[list[int], torch.Tensor]:
        """`count` greedy tokens after `ids`, and the logits ``[count, V]`` each was followed by."""
        out = self.model(torch.tensor([list(ids)]), use_cache=True, logits_to_keep=1)
        tokens, rows = [int(out.logits[0, -1].argmax())], []
        for _ in range(count):
            out = self.model(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True)
            rows.append(out.logits[0, -1].float())
            tokens.append(int(rows[-1].argmax()))
        return tokens[:count], torch.stack(rows)


def compare_with_transformers(
    session: Session, reference: TransformersReference, ids: Sequence[int], effort: Effort, detail: Detail
) -> list[Comparison]:
    """For each chunk length: the prompt's logits at every call, then greedy tokens of the reference one by one."""
    detail("reference logits")
    rows = reference.logits(ids)
    tokens, greedy_rows = reference.greedy(ids, effort.greedy)
    first = len(ids) - effort.tail - 1 if effort.tail else 0  # the first position whose next token counts
    targets = torch.tensor(list(ids[first + 1 :]))
    reference_nll = float(torch.nn.functional.cross_entropy(rows[first:-1].double(), targets))
    comparisons = []
    for chunk in sorted({min(chunk, session.manifest.max_prefill_chunk) for chunk in effort.chunks}):
        detail(f"chunks of {chunk}")
        differences = Differences(f"{TRANSFORMERS}, chunks of {chunk}", session.manifest.program.format)
        losses: list[float] = []
        session.reset()

        def observe(position: int, logits: torch.Tensor, differences: Differences = differences) -> None:
            if position >= len(ids):
                return
            differences.add(logits, rows[position])
            if first <= position < len(ids) - 1:
                losses.append(-float(torch.log_softmax(logits.double(), -1)[ids[position + 1]]))  # noqa: B023

        session.observer = observe
        logits = session.prefill(ids[: len(ids) - effort.tail], chunk)
        for token in ids[len(ids) - effort.tail :]:
            logits = session.decode(token)
        agreed = 0
        for token, want in zip(tokens, greedy_rows, strict=True):
            agreed += int(logits.argmax()) == token
            logits = session.decode(token)
            differences.add(logits, want)
        session.observer = None
        nll = {}
        if chunk == 1 or effort.tail:
            assert len(losses) == len(targets)
            nll = {"nll": sum(losses) / len(losses), "reference_nll": reference_nll}
        comparisons.append(differences.comparison(greedy_agreement=f"{agreed} of {effort.greedy}", **nll))
    return comparisons
