"""An unread decoder gets its weights a part at a time, and nothing that is made of it differs."""

from __future__ import annotations

import weakref

import pytest
import torch
from recipes import quantize_by
from tiny_models import SPECS, decoder_of, one_thread, token_ids  # noqa: F401
from toy import toy_manifest

from exporter.cache.plain import PlainKernels
from exporter.errors import CheckpointError
from exporter.model.decoder import Decoder
from exporter.quantization import QuantizedLinear, calibration, gptq
from exporter.quantization.modules import floats_held
from exporter.runs import Calls, eager_session, run, run_by_layers
from exporter.spec import PRESETS, CachePolicy, Manifest, QuantizationSpec, state_specs

CONTEXT = 192
IDS = torch.tensor([token_ids(100, seed=3)])
QUANTIZATIONS = {
    "accurate": PRESETS["accurate"],
    "plain": QuantizationSpec(linear="int8", embedding="int8", head="int8"),
    "gptq": QuantizationSpec(
        linear="int4", keep_int8=("o_proj",), head="int4", embedding="int8", rounding="gptq", smooth=True
    ),
}
CALLS = Calls(token_ids(60), [1, 1, 2, 7, 20, 1, 13, 1, 1])


class Reader:
    """Reads from a whole decoder; `before` sees the decoder that asks, and the name, first."""

    def __init__(self, original: Decoder, asking: Decoder) -> None:
        self.weights, self.asking = dict(original.named_parameters(remove_duplicate=False)), asking
        self.names: list[str] = []

    def __call__(self, name: str) -> torch.Tensor:
        self.names.append(name)
        if self.weights["lm_head.weight"] is not self.weights.get("embed_tokens.weight"):
            tables = [self.asking.lm_head, self.asking.embed_tokens]
            floats = [one for one in tables if isinstance(one, torch.nn.Linear | torch.nn.Embedding)]
            assert all(one.weight.is_meta for one in floats), f"{name} is read while a table is there"
        if name.startswith("layers."):
            others = [n for n in self.floats("layers.") if n.split(".")[1] != name.split(".")[1]]
            assert not others, f"{name} is read while {others} are there"
        return self.weights[name].clone()

    def floats(self, prefix: str) -> list[str]:
        """The matrices of linears that are in memory."""
        linears = [(n, m) for n, m in self.asking.named_modules() if isinstance(m, torch.nn.Linear)]
        return [n for n, m in linears if n.startswith(prefix) and not n.endswith("router") and not m.weight.is_meta]


def unread(original: Decoder) -> tuple[Decoder, Reader]:
    decoder = Decoder.unread(original.spec, original.states, None)
    return decoder, Reader(original, decoder)


@pytest.mark.parametrize("rules", QUANTIZATIONS)
@pytest.mark.parametrize("name", SPECS)
def test_quantising_while_reading_gives_the_same_model(name: str, rules: str) -> None:
    whole = decoder_of(SPECS[name])
    decoder, read = unread(decoder_of(SPECS[name]))
    for one, *reader in ((whole,), (decoder, read)):
        quantize_by(QUANTIZATIONS[rules], one, IDS, *reader)
    again = [] if whole.spec.tie_word_embeddings or rules == "plain" else ["embed_tokens.weight"]
    assert sorted(read.names) == sorted([*set(read.names), *again]), "nothing else is read twice"
    assert not any(parameter.is_meta for parameter in decoder.parameters())
    ours, theirs = decoder.state_dict(), whole.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_what_a_layer_was_read_and_observed_for_is_gone_before_the_next_is_read() -> None:
    """Float weights, moments of inputs: whatever refers to them."""
    decoder, read = unread(decoder_of(SPECS["gemma"]))
    alive: list[tuple[str, weakref.ref[torch.Tensor]]] = []

    def watched(name: str) -> torch.Tensor:
        part = name.split(".")[1] if name.startswith("layers.") else name
        left = [of for of, one in alive if of != part and one() is not None]
        assert not left, f"{name} is read while something of layer {left} is there"
        tensor = read(name)
        if name.startswith("layers.") and "norm" not in name:
            alive.append((part, weakref.ref(tensor)))
        return tensor

    made, inputs = calibration.Inputs.none_yet.__func__, []

    def none_yet(cls: type, channels: int, sizes: list[int]) -> calibration.Inputs:
        new = made(cls, channels, sizes)
        inputs.append(weakref.ref(new))
        assert sum(one() is not None for one in inputs) <= 4, "inputs of a layer, of which there are four"
        return new

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration.Inputs, "none_yet", classmethod(none_yet))
        quantize_by(PRESETS["accurate"], decoder, IDS, watched)
    assert len(alive) == 7 * len(decoder.layers) and len(inputs) == 4 * len(decoder.layers) + 1


def test_stretches_of_columns_change_what_is_rounded_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = decoder_of(SPECS["gemma"]), decoder_of(SPECS["gemma"])
    quantize_by(PRESETS["small"], whole, IDS)
    monkeypatch.setattr(gptq, "COLUMNS_TOGETHER", 32)
    quantize_by(PRESETS["small"], cut, IDS)
    ours, theirs = cut.state_dict(), whole.state_dict()
    linears = [name for name, module in whole.named_modules() if isinstance(module, QuantizedLinear)]
    wide = [name for name in linears if whole.get_submodule(name).weight.shape[1] > 32]
    assert wide and all(not torch.equal(ours[f"{name}.weight"], theirs[f"{name}.weight"]) for name in wide)
    for name in (name for name in theirs if name.endswith("norm.weight")):
        assert torch.equal(ours[name], theirs[name]), name
    play = [run(eager_session(manifest_of(one), one), CALLS).logits for one in (whole, cut)]
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(*play, strict=True))
    assert error < 0.5, "either is the model, to four bits"


@pytest.mark.parametrize("preset", ["accurate", "small"])
@pytest.mark.parametrize("name", ["layers.1.mixer.v_proj.weight", "norm.weight"])
def test_a_model_that_makes_no_numbers_is_refused(preset: str, name: str) -> None:
    decoder = decoder_of(SPECS["gemma"])
    decoder.get_parameter(name).data.view(-1)[3] = torch.nan
    where = "layers.1.mixer.o_proj" if "layers" in name else "lm_head"
    with pytest.raises(CheckpointError, match=f"the input of {where} when"):
        quantize_by(PRESETS[preset], decoder, IDS)


def manifest_of(decoder: Decoder) -> Manifest:
    manifest = toy_manifest(context=CONTEXT, chunk=64)
    policy = CachePolicy(initial_rows=64)
    changed = manifest.model_copy(update={"model": decoder.spec, "cache": policy})
    return changed.with_states(state_specs(decoder.spec, policy, CONTEXT))


@pytest.mark.parametrize("name", SPECS)
def test_layer_by_layer_says_what_a_session_says(name: str) -> None:
    whole = decoder_of(SPECS[name], initial_rows=64)
    manifest = manifest_of(whole)
    decoder, read = unread(whole)
    expected, got = run(eager_session(manifest, whole), CALLS), run_by_layers(manifest, decoder, CALLS, read)
    assert got.state.tokens == expected.state.tokens == CALLS.ids[:47]
    for ours, theirs in zip(got.state.tensors, expected.state.tensors, strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(got.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))
    assert all(parameter.is_meta for parameter in decoder.parameters()), "every part is forgotten"


def test_a_quantised_model_that_is_all_read_stays_as_it_is() -> None:
    decoder = decoder_of(SPECS["gemma"], initial_rows=64)
    quantize_by(QUANTIZATIONS["accurate"], decoder, IDS)
    before = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    manifest = manifest_of(decoder)
    got, expected = run_by_layers(manifest, decoder, CALLS), run(eager_session(manifest, decoder), CALLS)
    for ours, theirs in zip(got.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))
    after = decoder.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_weights_are_let_go_though_something_refers_to_them() -> None:
    decoder = decoder_of(SPECS["gemma"])
    quantize_by(QUANTIZATIONS["accurate"], decoder, IDS)
    kept = list(decoder.with_kernels(PlainKernels()).buffers())
    assert sum(tensor.untyped_storage().nbytes() for tensor in kept) > 0
    decoder.let_go()
    assert [tensor.untyped_storage().nbytes() for tensor in kept] == [0] * len(kept)


def test_floats_are_made_once_and_let_go() -> None:
    decoder = decoder_of(SPECS["gemma"])
    quantize_by(QUANTIZATIONS["plain"], decoder)
    linear = decoder.layers[0].feed_forward.up_proj
    assert isinstance(linear, QuantizedLinear)
    x = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0))
    wanted = linear(x)
    with floats_held(decoder.layers[0]):
        assert linear.floats is not None and torch.equal(linear.floats, linear.dequantized())
        linear.weight.zero_()  # no longer looked at
        assert torch.equal(linear(x), wanted)
    assert linear.floats is None and not torch.equal(linear(x), wanted)
