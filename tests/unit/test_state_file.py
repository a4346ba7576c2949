"""A saved conversation that somebody else wrote is held to what the kinds of its states keep."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_models import CacheDType
from toy import VOCAB, toy_manifest

from runtime_ref.state import State
from runtime_ref.state_file import StateFileError, checksum, seal

Tensors = dict[str, torch.Tensor]
Forge = Callable[[Tensors, dict[str, str]], None]
LENGTH, CONTEXT = 12, 96


def saved(path: Path, dtype: CacheDType = "float32") -> State:
    """A conversation of `LENGTH` tokens over all kinds, written to `path`."""
    state = State(toy_manifest(("ring", "full", "conv"), context=CONTEXT, dtype=dtype))
    state.ensure_rows(LENGTH)
    state.advance([7] * LENGTH)
    state.save(path)
    return state


def put(name: str, tensor: torch.Tensor) -> Forge:
    return lambda tensors, metadata: tensors.update({name: tensor})


def mark(text: str) -> Forge:
    return lambda tensors, metadata: metadata.update(high_water=text)


ROW = (1, 8)
FORGED: dict[str, tuple[Forge, str]] = {
    "a state missing": (lambda tensors, _: tensors.pop("layer_2_inputs"), "no layer_2_inputs where"),
    "a state too many": (put("layer_9_keys", torch.zeros(1)), "also layer_9_keys"),
    "a ring cut short": (put("layer_0_keys", torch.zeros(1, 7, *ROW)), r"layer_0_keys \[1, 7, 1, 8\] float32 where"),
    "more full rows than tokens": (put("layer_1_values", torch.zeros(1, LENGTH + 1, *ROW)), r"layer_1_values \[1, 13"),
    "fewer full rows than tokens": (put("layer_1_keys", torch.zeros(1, LENGTH - 1, *ROW)), r"layer_1_keys \[1, 11"),
    "heads and rows exchanged": (put("layer_1_keys", torch.zeros(1, 1, LENGTH, 8)), r"layer_1_keys \[1, 1, 12, 8\]"),
    "another convolution": (put("layer_2_inputs", torch.zeros(1, 3, 8)), r"\[1, 3, 8\] float32 where \[1, 2, 8\] fl"),
    "another dtype": (put("layer_0_keys", torch.zeros(1, 8, *ROW).half()), r"float16 where \[1, 8, 1, 8\] float32"),
    "a dtype no state has": (put("layer_0_keys", torch.zeros(1, 8, *ROW).double()), "None where"),
    "no tokens": (lambda tensors, _: tensors.pop("tokens"), r"tokens \[\] None"),
    "tokens that are no integers": (put("tokens", torch.zeros(LENGTH)), r"tokens \[12\] float32"),
    "tokens in two rows": (put("tokens", torch.zeros(1, LENGTH, dtype=torch.int64)), r"tokens \[1, 12\]"),
    "tokens beyond the context": (put("tokens", torch.zeros(CONTEXT + 1, dtype=torch.int64)), r"tokens \[97\]"),
    "a token outside the vocabulary": (put("tokens", torch.full((LENGTH,), VOCAB)), "outside the vocabulary"),
    "a negative token": (put("tokens", torch.full((LENGTH,), -1)), "outside the vocabulary"),
    "no mark": (lambda _, metadata: metadata.pop("high_water"), "high-water mark ''"),
    "a mark that is no number": (mark("many"), "high-water mark 'many'"),
    "a mark below the tokens": (mark(str(LENGTH - 1)), "high-water mark '11'"),
    "a mark beyond the context": (mark(str(CONTEXT + 1)), "high-water mark '97'"),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_file_of_the_right_model_is_refused(tmp_path: Path, forged: str) -> None:
    """Its version, fingerprint and checksums are right: whoever has the bundle can compute them."""
    path = tmp_path / "talk"
    state = saved(path)
    with safe_open(path, framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118
    forge, words = FORGED[forged]
    forge(tensors, metadata)
    metadata["checksums"] = json.dumps({name: checksum(tensor) for name, tensor in tensors.items()})
    metadata["seal"] = seal(metadata)
    save_file(tensors, path, metadata)
    before = [tensor.clone() for tensor in state.tensors]
    with pytest.raises(StateFileError, match=words):
        state.load(path)
    assert state.length == LENGTH and all(map(torch.equal, state.tensors, before))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_what_is_in_a_file(tmp_path: Path, dtype: CacheDType) -> None:
    state = saved(tmp_path / "talk", dtype)
    with safe_open(tmp_path / "talk", framework="pt") as file:
        shapes = {name: tuple(file.get_tensor(name).shape) for name in file.keys()}  # noqa: SIM118
    rows = {"ring": 8, "full": LENGTH, "conv": 2}
    wanted = {spec.name: (1, rows[spec.kind], *spec.row_shape) for spec in state.manifest.states}
    assert shapes == {"tokens": (LENGTH,), **wanted}
    again = State(state.manifest)
    again.load(tmp_path / "talk")
    assert again.length == LENGTH and again.high_water == LENGTH


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, State]:
    path = tmp_path_factory.mktemp("state") / "talk"
    state = saved(path)
    for number, tensor in enumerate(state.tensors):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) / (7 + number))
    state.save(path)
    return path, path.read_bytes(), state


def damages(size: int) -> st.SearchStrategy[tuple[str, int, int]]:
    kinds = st.sampled_from(["flip", "cut", "insert", "swap", "zero"])
    return st.tuples(kinds, st.integers(0, size - 1), st.integers(0, size - 1))


@settings(max_examples=1000, deadline=None)
@given(data=st.data())
def test_a_file_with_any_byte_changed_is_refused(whole: tuple[Path, bytes, State], data: st.DataObject) -> None:
    path, content, state = whole
    kind, place, other = data.draw(damages(len(content)))
    changed = bytearray(content)
    if kind == "flip":
        changed[place] ^= 1 << other % 8
    elif kind == "cut":
        del changed[place:]
    elif kind == "insert":
        changed.insert(place, other % 256)
    elif kind == "swap":
        changed[place], changed[other] = changed[other], changed[place]
    else:
        changed[min(place, other) : max(place, other)] = bytes(abs(place - other))
    if changed == content:
        return
    path.write_bytes(changed)
    before = [tensor.clone() for tensor in state.tensors]
    with pytest.raises(StateFileError):
        state.load(path)
    assert state.length == LENGTH and all(map(torch.equal, state.tensors, before))


def test_the_damaged_tensor_is_named_and_a_whole_file_is_taken(whole: tuple[Path, bytes, State]) -> None:
    path, content, state = whole
    name, tensor = state.manifest.states[0].name, state.tensors[0]
    place = content.index(tensor[0, :LENGTH].flatten().numpy().tobytes()[:64])
    path.write_bytes(content[: place + 8] + bytes([content[place + 8] ^ 0x40]) + content[place + 9 :])
    with pytest.raises(StateFileError, match=f"other bytes than were saved, in {name}; "):
        state.load(path)
    path.write_bytes(content)
    state.load(path)


def test_two_tensors_in_each_others_place_are_refused(whole: tuple[Path, bytes, State]) -> None:
    """The bytes of keys and values, exchanged: each is a tensor that was saved."""
    path, content, state = whole
    path.write_bytes(content)
    with safe_open(path, framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118
    first, second = (spec.name for spec in state.manifest.states[:2])
    tensors[first], tensors[second] = tensors[second].clone(), tensors[first].clone()
    save_file(tensors, path, metadata)
    with pytest.raises(StateFileError, match=f"in {first}, {second}"):
        state.load(path)


@pytest.mark.parametrize("change", ["another blank", "a blank more", "a key twice"])
def test_a_header_that_says_the_same_in_other_bytes_is_refused(whole: tuple[Path, bytes, State], change: str) -> None:
    path, content, state = whole
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length].rstrip(), content[8 + length :]
    if change == "another blank":
        header += b"\n"
    elif change == "a blank more":
        header = header.replace(b'":{', b'": {', 1)
    else:
        header = header.replace(b'"dtype":"F32",', b'"dtype":"I64","dtype":"F32",', 1)
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    with pytest.raises(StateFileError):
        state.load(path)
    path.write_bytes(content)
    state.load(path)
