"""What rounding cannot explain is refused: programs with one fault each, beside the eager model they should be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from recipes import quantize_by, recipe_of
from tiny_models import GLOBAL, SLIDING, CacheDType, decoder_of, model, one_thread, randomize, token_ids  # noqa: F401
from toy import toy_manifest

from exporter.cache.interface import States
from exporter.cache.plain import FullKVCache, PlainKernels, RingKVCache
from exporter.errors import VerificationError
from exporter.model.decoder import Decoder
from exporter.quantization import QuantizedLinear
from exporter.spec import EAGER, PRESETS, CachePolicy, Comparison, Manifest
from exporter.verification import Calls, compare_with_eager, eager_session, judge, run
from exporter.verification.judge import rounding_of

CONTEXT = 192
SPEC = model(*[SLIDING] * 3, GLOBAL, SLIDING, tie_word_embeddings=False)
CALLS = Calls(token_ids(90), [1, 1, 2, 7, 40, 10, *[1] * 8])
# What rounds -> preset, dtype of the caches.
KINDS: dict[str, tuple[str, CacheDType]] = {
    "nothing": ("none", "float32"),
    "float16": ("none", "float16"),
    "int8 rows": ("none", "int8"),
    "activations": ("small", "float16"),
}


def of_kind(kind: str) -> tuple[Manifest, Decoder]:
    preset, dtype = KINDS[kind]
    decoder = decoder_of(SPEC, context=CONTEXT, dtype=dtype)
    quantize_by(PRESETS[preset], decoder, torch.tensor([token_ids(100, seed=3)]))
    manifest = toy_manifest(context=CONTEXT, chunk=64)
    update = {"model": SPEC, "cache": CachePolicy(dtype=dtype, initial_rows=64)}
    manifest = manifest.model_copy(update=update).with_states(decoder.states)
    program = manifest.program.model_copy(update={"recipe": recipe_of(SPEC, PRESETS[preset])})
    manifest = manifest.model_copy(update={"programs": (program,)})
    assert rounding_of(manifest) == kind
    return manifest, decoder


def compared(manifest: Manifest, program: Decoder, decoder: Decoder) -> Comparison:
    """The decoder `program` in the place of a program."""
    runs = [run(eager_session(manifest, one), CALLS) for one in (program, decoder)]
    (comparison,) = compare_with_eager(runs[0], runs[1], runs[1])
    return comparison


class OneFault(PlainKernels):
    """Plain kernels whose caches of the `count`-th attention layer are made by `fault`."""

    def __init__(self, count: int, fault: Callable[[Any], Any], layers: int = len(SPEC.layers)) -> None:
        self.turn, self.count, self.fault, self.layers = 0, count, fault, layers

    def _maybe(self, cache: Any) -> Any:
        self.turn += 1
        return self.fault(cache) if (self.turn - 1) % self.layers == self.count else cache

    def ring(self, states: Sequence[torch.Tensor], window: int) -> RingKVCache:
        return self._maybe(super().ring(states, window))

    def full(self, states: Sequence[torch.Tensor]) -> FullKVCache:
        return self._maybe(super().full(states))


def off_by_one(cache: Any) -> Any:
    """Decode writes a row too early."""
    update_and_fetch = cache.update_and_fetch
    cache.update_and_fetch = lambda chunk, offset: update_and_fetch(chunk, max(offset - 1, 0))
    return cache


def chunks_off_by_one(cache: Any) -> Any:
    update = cache.update
    cache.update = lambda chunk, offset: update(tuple(rows.roll(1, 1) for rows in chunk), offset)
    return cache


def no_keys(cache: Any) -> Any:
    """Decode writes values only."""
    update_and_fetch, states = cache.update_and_fetch, cache.states

    def write(chunk: States, offset: int) -> States:
        kept = [state.clone() for state in states[: len(states) // 2]]
        fetched = update_and_fetch(chunk, offset)
        for state, before in zip(states, kept, strict=False):
            state.copy_(before)
        return fetched

    cache.update_and_fetch = write
    return cache


def swapped(decoder: Decoder) -> None:
    """Two layers have each other's weights."""
    layers = list(decoder.layers)
    layers[0], layers[2] = layers[2], layers[0]
    decoder.layers = torch.nn.ModuleList(layers)  # type: ignore[assignment]


def scaled(name: str) -> Callable[[Decoder], None]:
    """One linear has scales twice as large."""

    def fault(decoder: Decoder) -> None:
        linear = decoder.layers[1].get_submodule(name)
        if isinstance(linear, QuantizedLinear):
            linear.scales.mul_(2)
        else:
            linear.weight.mul_(2)

    return fault


WEIGHTS: dict[str, Callable[[Decoder], None]] = {
    "swapped layers": swapped,
    **{name: scaled(name) for name in ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj", "mixer.o_proj",
                                       "feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj")},
}  # fmt: skip
CACHES = {"a ring's slot": (2, off_by_one), "a chunk's slots": (2, chunks_off_by_one), "no keys": (1, no_keys),
          "a row": (3, off_by_one), "no keys of a global layer": (3, no_keys)}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", [*WEIGHTS, *CACHES])
def test_a_fault_in_one_layer_is_refused(kind: str, fault: str) -> None:
    manifest, decoder = of_kind(kind)
    broken = of_kind(kind)[1]
    if fault in WEIGHTS:
        WEIGHTS[fault](broken)
    else:
        broken = broken.with_kernels(OneFault(*CACHES[fault]))
    comparison = compared(manifest, broken, decoder)
    print(kind, fault, comparison)
    with pytest.raises(VerificationError, match=rf"against {EAGER}: got .* \(worst in layer_\d_(keys|values), layer"):
        judge([comparison], manifest)


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_that_is_right_but_for_the_last_bits_passes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of every linear differ in their last bits, as sums in another order do: values on a border fall on the
    other side, and all that follows differs by what rounding is worth."""
    manifest, decoder = of_kind(kind)
    twin, generator = of_kind(kind)[1], torch.Generator().manual_seed(0)

    def nudge(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        (x,) = inputs
        return (x * (1 + 1e-6 * torch.randn(x.shape, generator=generator)),)

    for module in twin.modules():
        if isinstance(module, QuantizedLinear | torch.nn.Linear):
            module.register_forward_pre_hook(nudge)
    comparison = compared(manifest, twin, decoder)
    print(kind, comparison)
    assert comparison.max_state_error is not None and comparison.max_state_error > 0
    judge([comparison], manifest)
