"""What goes into every linear of the float model when it reads text.

Letters: T tokens, D hidden_size, K input channels of a linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.utils.hooks import RemovableHandle

from exporter.cache.plain import PlainKernels
from exporter.errors import CheckpointError
from exporter.model.decoder import Decoder, DecoderLayer, ReadParameter, all_read
from exporter.quantization.linears import linear_at


@dataclass
class Inputs:
    """What one input looked like.

    Attributes:
        fourth: the mean of ``x^4`` of every channel, float32 ``[K]``.
        moments: the mean of ``x x^T`` of each stretch of channels that was asked for, float32 ``[k, k]``, one after the
            other from the first channel on.
    """

    fourth: torch.Tensor
    moments: list[torch.Tensor]

    @classmethod
    def none_yet(cls, channels: int, sizes: Sequence[int]) -> Inputs:
        return cls(torch.zeros(channels), [torch.zeros(size, size) for size in sizes])

    def see(self, x: torch.Tensor, total: int) -> None:
        """``x [1, Q, K]``, of `total` tokens in all."""
        rows = x[0]
        self.fourth += rows.square().square_().sum(0).div_(total)
        for moments, own in zip(self.moments, self._cut(rows), strict=True):
            moments.addmm_(own.T, own, alpha=1 / total)

    def divide(self, factors: torch.Tensor) -> None:
        """Channel k of the input is now divided by ``factors[k]``."""
        self.fourth = self.fourth / factors.pow(4)
        for moments, own in zip(self.moments, self._cut(factors), strict=True):
            moments.div_(own[:, None]).div_(own)

    def _cut(self, channels: torch.Tensor) -> Sequence[torch.Tensor]:
        """``[..., K]`` cut as `moments` are."""
        return channels.split([len(moments) for moments in self.moments], -1) if self.moments else ()


def sites(layer: DecoderLayer) -> dict[str, tuple[str, ...]]:
    """The inputs of a layer's linears: the name of the first linear that takes it, and of all that do. Experts and
    their router are no such linears."""
    return {
        f"{part}.{site.linears[0]}": tuple(f"{part}.{name}" for name in site.linears)
        for part, module, _ in layer.parts()
        for site in module.sites
    }


HEAD = "lm_head"


@contextmanager
def over_plain_kernels(layer: DecoderLayer) -> Iterator[None]:
    """`layer` over plain aten for a while: a back end's kernels need states of its own."""
    own, layer.mixer.kernels = layer.mixer.kernels, PlainKernels()
    try:
        yield
    finally:
        layer.mixer.kernels = own


Cuts = Callable[[str, int], Sequence[int]]
"""Of the name of a site, such as ``layers.0.mixer.q_proj`` or ``lm_head``, and its channels: how many of them each
matrix of moments is of, or none where none are needed."""


@torch.no_grad()
def observe(
    decoder: Decoder, passages: Sequence[torch.Tensor], cuts: Cuts, read: ReadParameter = all_read
) -> Iterator[tuple[int | None, dict[str, Inputs]]]:
    """Run the float `decoder` over `passages` layer by layer, and give each layer's number and inputs once it is done
    with it; at last None and the head's.

    Whoever takes them may change the layer: the next one is fed what the float layer said. One layer's inputs and
    states are held at a time, beside the hidden states of all tokens; of an unread decoder each part is read when
    its turn comes.

    Args:
        decoder: run over plain kernels.
        passages: int64 ``[1, T]`` each, texts that have nothing to do with each other.
        cuts: which moments are asked for.
        read: gives the parameters of an unread decoder.

    Raises:
        CheckpointError: an input is not finite.
    """
    lengths = [ids.shape[1] for ids in passages]
    total = sum(lengths)
    if decoder.spec.tie_word_embeddings:  # the table is the head's too, which comes last
        decoder.read_part("embed_tokens", read)
    with decoder.reading("embed_tokens", read):
        hidden = [decoder.embed(ids) for ids in passages]
    found: dict[str, Inputs] = {}

    @contextmanager
    def watched(n: int) -> Iterator[None]:
        layer = decoder.layers[n]
        decoder.read_part(f"layers.{n}", read)
        found.update({name: _nothing_yet(n, layer, name, cuts) for name in sites(layer)})
        hooks = [_watch(linear_at(layer, name), inputs, total) for name, inputs in found.items()]
        with over_plain_kernels(layer):
            yield
        for hook in hooks:
            hook.remove()

    calls = [decoder.call(length, 0, write_first=False) for length in lengths]
    for n in decoder.through_layers(hidden, calls, lambda n: decoder.fresh_states(n, lengths), watched):
        _check_finite(f"layers.{n}.", found)
        yield n, found
        found.clear()
    for part in ("norm", HEAD):
        decoder.read_part(part, read)
    head = Inputs.none_yet(hidden[0].shape[-1], cuts(HEAD, hidden[0].shape[-1]))
    for rows in hidden:
        head.see(decoder.norm(rows), total)
    _check_finite("", {HEAD: head})
    yield None, {HEAD: head}


def _check_finite(prefix: str, found: Mapping[str, Inputs]) -> None:
    """Raises CheckpointError: the float model's own numbers are none."""
    for name, inputs in found.items():
        if not bool(inputs.fourth.isfinite().all()):
            raise CheckpointError(
                "checkpoint",
                got=f"NaN or infinite numbers in the input of {prefix}{name} when the float model reads text",
                expected="weights of a model that gives numbers",
                repair="Look for NaN in the weights up to there: the file is damaged, or not of this architecture.",
            )


def _nothing_yet(number: int, layer: DecoderLayer, site: str, cuts: Cuts) -> Inputs:
    channels = linear_at(layer, site).in_features
    return Inputs.none_yet(channels, cuts(f"layers.{number}.{site}", channels))


def _watch(linear: torch.nn.Linear, inputs: Inputs, total: int) -> RemovableHandle:
    return linear.register_forward_pre_hook(lambda _, arguments: inputs.see(arguments[0], total))
