"""Token ids as callers have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from toy import toy_manifest, toy_program

from exporter.errors import RuntimeLimitError
from runtime_ref.ids import token_ids, whole
from runtime_ref.score import score
from runtime_ref.session import Session

IDS = [3, 1, 4, 1, 5]


def session() -> Session:
    manifest = toy_manifest()
    return Session(manifest, toy_program(manifest))


ALIKE: list[Any] = [
    IDS,
    tuple(IDS),
    np.array(IDS),
    np.array(IDS, dtype=np.uint8),
    list(np.array(IDS)),
    torch.tensor(IDS),
    torch.tensor(IDS, dtype=torch.int32),
    list(torch.tensor(IDS)),
    (token for token in IDS),
    [np.int32(3), torch.tensor(1), 4, np.uint64(1), 5],
]


@pytest.mark.parametrize("ids", ALIKE, ids=range(len(ALIKE)))
def test_integers_run_as_a_list_of_them_does(ids: Any) -> None:
    own = session()
    assert torch.equal(own.prefill(ids), session().prefill(IDS))
    assert own.state.tokens == IDS
    assert all(type(token) is int for token in own.state.tokens)


@pytest.mark.parametrize("token", [np.int64(7), torch.tensor(7), np.array(7), torch.tensor(7, dtype=torch.uint8)])
def test_one_token_too(token: Any) -> None:
    one, other = session(), session()
    one.prefill(IDS), other.prefill(IDS)
    assert torch.equal(one.decode(token), other.decode(7))
    assert one.state.tokens == [*IDS, 7] and type(one.state.tokens[-1]) is int


@pytest.mark.parametrize(
    "ids",
    [
        [1.5, 2.7], [1.0], [True, False], ["1"], [None], [[1, 2]], [1, 2.0], "123", b"123", {1, 2}, {1: 2}, 7, None,
        1.5, np.array([1.0, 2.0]), np.array([True]), np.array([[1, 2]]), np.array(["a"]), np.array(3), [np.float32(1)],
        [np.bool_(True)], torch.tensor([1.0]), torch.tensor([True]), torch.tensor([[1, 2]]), torch.tensor(3),
        [torch.tensor(1.0)], [torch.tensor(True)], [torch.tensor([1])], [np.array([1])], [1 + 0j],
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_list_of_integers_is_refused(ids: Any) -> None:
    own = session()
    with pytest.raises(RuntimeLimitError, match=r"whole number|sequence of token ids"):
        own.prefill(ids)
    assert own.length == 0
    with pytest.raises(RuntimeLimitError):
        own.prefill(ids, reuse=True)
    with pytest.raises(RuntimeLimitError):
        score(own, ids, prefill=1, chunk=1)


@pytest.mark.parametrize("token", [1.0, True, "1", None, [1], np.float64(1), np.bool_(True), torch.tensor([1])])
def test_so_is_what_is_no_token(token: Any) -> None:
    own = session()
    with pytest.raises(RuntimeLimitError, match="whole number"):
        own.decode(token)
    assert own.length == 0


@pytest.mark.parametrize("number", [2.0, True, "2", np.float32(2)])
def test_and_what_is_no_number_of_tokens(number: Any) -> None:
    own = session()
    own.prefill(IDS)
    with pytest.raises(RuntimeLimitError, match="chunk"):
        own.prefill(IDS, number)
    with pytest.raises(RuntimeLimitError, match="rewind"):
        own.rewind(number)
    assert own.length == 5
    own.rewind(np.int64(2))
    assert own.state.tokens == IDS[:3]


def test_empty_and_out_of_range_are_said_as_ever() -> None:
    for empty in ([], (), np.array([], dtype=int), torch.tensor([], dtype=torch.int64)):
        assert token_ids(empty) == []
        with pytest.raises(RuntimeLimitError, match="no tokens"):
            session().prefill(empty)
    for outside in ([-1], np.array([10**12]), [10**30], torch.tensor([-5])):
        with pytest.raises(RuntimeLimitError, match="token id"):
            session().prefill(outside)
    assert whole(np.int8(-3), "n") == -3
