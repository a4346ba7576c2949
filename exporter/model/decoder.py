"""The decoder, built from a `ModelSpec`.

Letters: Q query_len, S seq_len, V vocab_size, D hidden_size. `offset` = S - Q.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from exporter.cache.interface import CacheKernels
from exporter.cache.plain import PlainKernels
from exporter.model.norms import RMSNorm
from exporter.model.parts import Call, FeedForward, Mixer, Part, part_of
from exporter.model.rope import RotaryTable
from exporter.spec import LayerSpec, ModelSpec, StateSpec

ReadParameter = Callable[[str], torch.Tensor]
"""A parameter's name to its float32 values; called again, it reads again."""
Around = Callable[[int], AbstractContextManager[object]]
"""A layer's number to what surrounds the work of that layer."""


def all_read(name: str) -> torch.Tensor:
    """The `ReadParameter` of a decoder that has all its parameters."""
    raise AssertionError(f"{name} has no values and nothing to read them from")


class DecoderLayer(torch.nn.Module):
    """Mixer and feed-forward, each behind a norm and a residual; with `post_norms` each is normed once more."""

    def __init__(
        self, spec: LayerSpec, model: ModelSpec, kernels: CacheKernels, states: Sequence[StateSpec] = ()
    ) -> None:
        super().__init__()
        size, eps = model.hidden_size, model.norm_eps
        self.post_norms = spec.post_norms
        self.input_norm = RMSNorm(size, eps)
        self.mixer = part_of(spec.mixer, Mixer)(spec.mixer, size, eps, kernels, states)
        self.feed_forward_norm = RMSNorm(size, eps)
        self.feed_forward = part_of(spec.feed_forward, FeedForward)(spec.feed_forward, size)
        if spec.post_norms:
            self.post_mixer_norm = RMSNorm(size, eps)
            self.post_feed_forward_norm = RMSNorm(size, eps)

    def parts(self) -> tuple[tuple[str, Part, RMSNorm], ...]:
        """Mixer and feed-forward: the name of each, itself, and the norm before it."""
        return (
            ("mixer", self.mixer, self.input_norm),
            ("feed_forward", self.feed_forward, self.feed_forward_norm),
        )  # fmt: skip

    def forward(self, hidden: torch.Tensor, call: Call, states: list[torch.Tensor]) -> torch.Tensor:
        """``[1, Q, D]`` to ``[1, Q, D]``; `states` are the layer's own, in the order of the plan."""
        return self.feed(self.mix(hidden, self.mixer(self.input_norm(hidden), call, states)))

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
        self.layer_states = [
            [(i, state.layers.index(n)) for i, state in enumerate(states) if n in state.layers]
            for n in range(len(spec.layers))
        ]
        layers = [
            DecoderLayer(layer, spec, kernels, [self.states[i] for i, _ in places])
            for layer, places in zip(spec.layers, self.layer_states, strict=True)
        ]
        self.layers: Sequence[DecoderLayer] = torch.nn.ModuleList(layers)  # type: ignore[assignment]
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.lm_head: torch.nn.Module = torch.nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        if spec.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.ropes = list(dict.fromkeys(rope for layer in layers if (rope := layer.mixer.rope) is not None))
        self.rotary_tables = torch.nn.ModuleList(RotaryTable(rope) for rope in self.ropes)

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
        hidden = [self.embed(input_ids)]
        call = self.call(query_len, offset, write_first)
        for _ in self.through_layers(hidden, [call], lambda n: [self.states_of(n, states)]):
            pass
        return hidden[0]

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 ``[1, Q]`` to what the first layer takes, ``[1, Q, D]``."""
        hidden: torch.Tensor = self.embed_tokens(input_ids)
        return hidden * self.spec.embedding_scale if self.spec.embedding_scale != 1.0 else hidden

    def call(self, query_len: int, offset: int, write_first: bool) -> Call:
        """A call with Q tokens from position `offset` on."""
        positions = (torch.arange(query_len) + offset).to(torch.float32)
        tables = zip(self.ropes, self.rotary_tables, strict=True)
        return Call(query_len, offset, write_first, {None: None, **{rope: table(positions) for rope, table in tables}})

    def states_of(self, n: int, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Layer n's own part ``[1, rows, ...]`` of `states`, which are in the order of the plan."""
        return [
            states[i].narrow(0, place, 1) if len(self.states[i].layers) > 1 else states[i]
            for i, place in self.layer_states[n]
        ]

    def fresh_states(self, n: int, lengths: Iterable[int]) -> Iterator[list[torch.Tensor]]:
        """Layer n's own states, in the order of the plan, for one text after the other: zeros, of as many rows as texts
        of these lengths need."""
        specs = [self.states[i] for i, _ in self.layer_states[n]]
        for rows in lengths:
            yield [torch.zeros((1, s.rows_for(rows), *s.row_shape), dtype=getattr(torch, s.dtype)) for s in specs]

    def through_layers(
        self, hidden: list[torch.Tensor], calls: Sequence[Call],
        states: Callable[[int], Iterable[list[torch.Tensor]]],
        around: Around = lambda n: nullcontext(),
    ) -> Iterator[int]:  # fmt: skip
        """Take the tokens of `calls` through one layer after the other: the one loop over layers there is.

        A layer does its part of all calls before the next one is looked at. Its number is given once it is done, and
        whoever takes it may change the layer then.

        Args:
            hidden: what the first layer takes of each call, ``[1, Q, D]``; replaced, item by item, by what comes out.
            calls: in the order in which they are made.
            states: a layer's number to its own states, in the order of the plan, for one call after the other: the same
                for calls that continue each other, others for a text of its own.
            around: what surrounds a layer's work.
        """
        for n in range(len(self.layers)):
            with around(n):
                self._through_layer(n, hidden, calls, states(n))
            yield n

    def _through_layer(
        self, n: int, hidden: list[torch.Tensor], calls: Sequence[Call], states: Iterable[list[torch.Tensor]]
    ) -> None:
        for i, (call, own) in enumerate(zip(calls, states, strict=False)):
            hidden[i] = self.layers[n](hidden[i], call, own)

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
