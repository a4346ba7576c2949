"""The decoder, built from a `ModelSpec`.

Letters: Q query_len, S seq_len, V vocab_size, D hidden_size. `offset` = S - Q.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from exporter.cache.interface import CacheKernels
from exporter.cache.plain import PlainKernels
from exporter.model.attention import Attention
from exporter.model.convolution import ShortConv
from exporter.model.mlp import MLP
from exporter.model.moe import MoE
from exporter.model.norms import RMSNorm
from exporter.model.rope import RotaryTable
from exporter.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, StateSpec

ReadParameter = Callable[[str], torch.Tensor]
"""A parameter's name to its float32 values; called again, it reads again."""


def all_read(name: str) -> torch.Tensor:
    """The `ReadParameter` of a decoder that has all its parameters."""
    raise AssertionError(f"{name} has no values and nothing to read them from")


class DecoderLayer(torch.nn.Module):
    """Mixer and feed-forward, each behind a norm and a residual; with `post_norms` each is normed once more."""

    def __init__(self, spec: LayerSpec, model: ModelSpec, kernels: CacheKernels) -> None:
        super().__init__()
        size, eps = model.hidden_size, model.norm_eps
        self.post_norms = spec.post_norms
        self.input_norm = RMSNorm(size, eps)
        self.mixer: Attention | ShortConv
        if isinstance(spec.mixer, AttentionSpec):
            self.mixer = Attention(spec.mixer, size, eps, kernels)
        else:
            self.mixer = ShortConv(spec.mixer, size)
        self.feed_forward_norm = RMSNorm(size, eps)
        feed_forward = spec.feed_forward
        self.feed_forward = MLP(feed_forward, size) if isinstance(feed_forward, MLPSpec) else MoE(feed_forward, size)
        if spec.post_norms:
            self.post_mixer_norm = RMSNorm(size, eps)
            self.post_feed_forward_norm = RMSNorm(size, eps)

    def mix(self, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        return hidden + (self.post_mixer_norm(mixed) if self.post_norms else mixed)

    def feed(self, hidden: torch.Tensor) -> torch.Tensor:
        fed = self.feed_forward(self.feed_forward_norm(hidden))
        return hidden + (self.post_feed_forward_norm(fed) if self.post_norms else fed)


class Decoder(torch.nn.Module):
    """A decoder language model over caller-owned state.

    Args:
        spec: what to build.
        states: the state's plan (`spec.state_specs`), which fixes each layer's effective window.
        kernels: the cache implementation; plain aten unless a back end brings its own.
    """

    def __init__(self, spec: ModelSpec, states: Sequence[StateSpec], kernels: CacheKernels | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.states = tuple(states)
        kernels = kernels or PlainKernels()
        self.embed_tokens: torch.nn.Module = torch.nn.Embedding(spec.vocab_size, spec.hidden_size)
        layers = [DecoderLayer(layer, spec, kernels) for layer in spec.layers]
        self.layers: Sequence[DecoderLayer] = torch.nn.ModuleList(layers)  # type: ignore[assignment]
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.lm_head: torch.nn.Module = torch.nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        if spec.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        ropes = [layer.mixer.rope if isinstance(layer.mixer, AttentionSpec) else None for layer in spec.layers]
        distinct = [rope for i, rope in enumerate(ropes) if rope is not None and rope not in ropes[:i]]
        self.rotary_tables = torch.nn.ModuleList(RotaryTable(rope) for rope in distinct)
        self.rotary_index = [None if rope is None else distinct.index(rope) for rope in ropes]
        self.layer_states = [
            [(i, state.layers.index(n)) for i, state in enumerate(states) if n in state.layers]
            for n in range(len(spec.layers))
        ]

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, states: Sequence[torch.Tensor], write_first: bool
    ) -> torch.Tensor:
        """The last token's logits ``[1, V]``; arguments as `hidden_states`."""
        hidden = self.hidden_states(input_ids, position_ids, states, write_first)
        return self.logits(hidden[:, -1:, :])[:, 0]

    def hidden_states(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, states: Sequence[torch.Tensor], write_first: bool
    ) -> torch.Tensor:
        """input_ids int64 ``[1, Q]``, position_ids int64 ``[1, S]`` (only its length counts) to ``[1, Q, D]``.

        `states`, in the order of the plan, are written in place. `write_first` selects decode's ring access and takes
        exactly one token.

        Raises:
            ValueError: `write_first` with Q > 1 on a model with sliding layers.
        """
        query_len = input_ids.shape[1]
        offset = position_ids.shape[1] - query_len
        torch._check(offset >= 0)
        hidden = self.embed(input_ids)
        turns = self.turns(query_len, offset)
        for n, places in enumerate(self.layer_states):
            own = [
                states[i].narrow(0, place, 1) if len(self.states[i].layers) > 1 else states[i] for i, place in places
            ]
            hidden = self.apply_layer(n, hidden, turns, own, offset=offset, write_first=write_first)
        return hidden

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 ``[1, Q]`` to what the first layer takes, ``[1, Q, D]``."""
        hidden: torch.Tensor = self.embed_tokens(input_ids)
        return hidden * self.spec.embedding_scale if self.spec.embedding_scale != 1.0 else hidden

    def turns(self, query_len: int, offset: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What every rotary table says for Q positions from `offset`."""
        positions = (torch.arange(query_len) + offset).to(torch.float32)
        return [table(positions) for table in self.rotary_tables]

    def apply_layer(
        self, n: int, hidden: torch.Tensor, turns: list[tuple[torch.Tensor, torch.Tensor]],
        own: list[torch.Tensor], *, offset: int, write_first: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Layer n alone, ``[1, Q, D]`` to ``[1, Q, D]``; `own` are its states, in the order of the plan."""
        layer, rope = self.layers[n], self.rotary_index[n]
        normed = layer.input_norm(hidden)
        if isinstance(layer.mixer, Attention):
            window = self.states[self.layer_states[n][0][0]].window
            turn = None if rope is None else turns[rope]
            mixed = layer.mixer(normed, turn, own, offset=offset, window=window, write_first=write_first)
        else:
            mixed = layer.mixer(normed, own[0], offset)
        return layer.feed(layer.mix(hidden, mixed))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What `hidden_states` returned, ``[1, Q, D]``, to ``[1, Q, V]``."""
        logits = self.lm_head(self.norm(hidden))
        if self.spec.final_logit_softcap is not None:
            logits = torch.tanh(logits / self.spec.final_logit_softcap) * self.spec.final_logit_softcap
        return logits

    @classmethod
    def from_state_dict(
        cls,
        spec: ModelSpec,
        states: Sequence[StateSpec],
        kernels: CacheKernels | None,
        state_dict: Mapping[str, torch.Tensor],
    ) -> Decoder:
        """A decoder over the tensors of `state_dict` themselves (`parameter_shapes` names them); nothing is copied."""
        decoder = cls.unread(spec, states, kernels)
        missing, unexpected = decoder.load_state_dict(state_dict, strict=False, assign=True)
        tied = {"lm_head.weight"} if spec.tie_word_embeddings else set()
        assert set(missing) <= tied and not unexpected, f"missing {missing}, unexpected {unexpected}"
        if spec.tie_word_embeddings:
            decoder.lm_head.weight = decoder.embed_tokens.weight
        return decoder

    @classmethod
    def unread(cls, spec: ModelSpec, states: Sequence[StateSpec], kernels: CacheKernels | None) -> Decoder:
        """A decoder without weights, for whoever needs a part of them at a time (`read_part`, `reading`)."""
        with torch.device("meta"):
            decoder = cls(spec, states, kernels)
        return decoder.requires_grad_(False).eval()

    def read_part(self, part: str, read: ReadParameter) -> None:
        """Give every parameter of submodule `part` that has no values yet those that `read` returns for its name. A
        tied head is the embedding's own parameter."""
        if part == "lm_head" and self.spec.tie_word_embeddings:
            self.read_part("embed_tokens", read)
            return
        module = self.get_submodule(part)
        missing = [name for name, parameter in module.named_parameters() if parameter.is_meta]
        module.load_state_dict({name: read(f"{part}.{name}") for name in missing}, strict=False, assign=True)
        if part == "embed_tokens" and missing and self.spec.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    @contextmanager
    def reading(self, part: str, read: ReadParameter) -> Iterator[None]:
        """`read_part` for as long as it is needed: what had no values before has none afterwards."""
        before = dict(self.named_parameters(remove_duplicate=False))
        self.read_part(part, read)
        try:
            yield
        finally:
            for name, parameter in before.items():
                owner, _, own_name = name.rpartition(".")
                setattr(self.get_submodule(owner), own_name, parameter)

    def let_go(self) -> None:
        """Free the weights, whoever still refers to them: torch keeps graphs of what was traced."""
        for tensor in (*self.parameters(), *self.buffers()):
            storage = tensor.untyped_storage()
            if storage.resizable():
                storage.resize_(0)

    def with_kernels(self, kernels: CacheKernels) -> Decoder:
        """The same parameters over another cache implementation."""
        shared = {id(tensor): tensor for tensor in (*self.parameters(), *self.buffers())}
        twin = copy.deepcopy(self, {**shared, id(self.spec): self.spec})
        for layer in twin.layers:
            if isinstance(layer.mixer, Attention):
                layer.mixer.kernels = kernels
        return twin


def parameter_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every parameter a checkpoint must bring, by name; a tied head is no parameter of its own."""
    with torch.device("meta"):
        decoder = Decoder(spec, [])
    shapes = {name: tuple(p.shape) for name, p in decoder.named_parameters()}
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    return shapes
