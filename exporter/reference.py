"""The model a bundle is held against: Transformers, in float32, from the same checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from exporter.checkpoint import Checkpoint


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
