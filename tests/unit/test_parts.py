"""The parts that a layer is put together from, and the one loop that goes through the layers."""

from __future__ import annotations

from itertools import repeat

import pytest
import torch
from tiny_models import SPECS, decoder_of, one_thread, states_of, token_ids  # noqa: F401

from exporter.kinds import MIXERS
from exporter.model.decoder import Decoder
from exporter.model.parts import FeedForward, Mixer, Part, part_of
from exporter.quantization.calibration import sites
from exporter.spec import MLPSpec, MoESpec


def test_every_spec_has_a_part_that_computes_it() -> None:
    for layer in (layer for spec in SPECS.values() for layer in spec.layers):
        assert issubclass(part_of(layer.mixer, Mixer), Mixer)
        assert issubclass(part_of(layer.feed_forward, FeedForward), FeedForward)
    assert Part.of.keys() == {*MIXERS, MLPSpec, MoESpec}


@pytest.mark.parametrize("name", SPECS)
def test_every_linear_has_one_input(name: str) -> None:
    """Routers of experts have none that is known: they are not quantised."""
    for layer in decoder_of(SPECS[name]).layers:
        linears = {
            n for n, module in layer.named_modules() if isinstance(module, torch.nn.Linear) and "router" not in n
        }
        named = [linear for users in sites(layer).values() for linear in users]
        assert len(named) == len(set(named)) and set(named) == linears
        assert all(users[0] == site for site, users in sites(layer).items())


def through(decoder: Decoder, ids: list[int], *, spoil: bool) -> list[torch.Tensor]:
    """Two calls, of 5 tokens and of one; with `spoil` every layer is made useless once it is done."""
    states = states_of(decoder)
    hidden = [decoder.embed(torch.tensor([ids[:5]])), decoder.embed(torch.tensor([ids[5:]]))]
    calls = [decoder.call(5, 0, write_first=False), decoder.call(1, 5, write_first=True)]
    seen = []
    with torch.no_grad():
        for n in decoder.through_layers(hidden, calls, lambda n: repeat(decoder.states_of(n, states))):
            seen.append(n)
            if spoil:
                for parameter in decoder.layers[n].parameters():
                    parameter.fill_(torch.nan)
    assert seen == list(range(len(decoder.layers)))
    return hidden


@pytest.mark.parametrize("name", ["gemma", "sinks and experts", "short convolution"])
def test_whoever_takes_a_layers_number_may_change_the_layer(name: str) -> None:
    ids = token_ids(6)
    kept, spoilt = (through(decoder_of(SPECS[name]), ids, spoil=spoil) for spoil in (False, True))
    assert all(map(torch.equal, kept, spoilt))
    whole, states = decoder_of(SPECS[name]), states_of(decoder_of(SPECS[name]))
    with torch.no_grad():
        first = whole.hidden_states(torch.tensor([ids[:5]]), torch.zeros(1, 5), states, write_first=False)
        last = whole.hidden_states(torch.tensor([ids[5:]]), torch.zeros(1, 6), states, write_first=True)
    assert torch.equal(kept[0], first) and torch.equal(kept[1], last)
