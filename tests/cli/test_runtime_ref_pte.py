"""The command line and sessions on a real exported bundle."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import runtime_ref
from runtime_ref.__main__ import main


def succeed(*argv: object) -> None:
    with pytest.raises(SystemExit) as caught:
        main([str(part) for part in argv])
    assert caught.value.code == 0


def some_ids(session: runtime_ref.Session, count: int) -> list[int]:
    vocab = session.manifest.model.vocab_size
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(0)).tolist()


def test_every_chunk_gives_the_same_logits(tiny_bundle: Path) -> None:
    session = runtime_ref.load(tiny_bundle)
    ids = some_ids(session, min(40, session.manifest.max_context_length))
    want = session.prefill(ids, 1)
    for chunk in range(2, session.manifest.max_prefill_chunk + 1):
        session.reset()
        torch.testing.assert_close(session.prefill(ids, chunk), want, atol=1e-3, rtol=1e-3)


def test_logits_outlive_the_next_call(tiny_bundle: Path) -> None:
    session = runtime_ref.load(tiny_bundle)
    ids = some_ids(session, 4)
    first = session.prefill(ids)
    kept = first.clone()
    second = session.decode(ids[0])
    assert torch.equal(first, kept)
    assert not torch.equal(first, second)


def test_two_sessions_share_no_state_and_a_fork_goes_its_own_way(tiny_bundle: Path) -> None:
    session, other = runtime_ref.load(tiny_bundle), runtime_ref.load(tiny_bundle)
    ids = some_ids(session, 20)
    want = session.prefill(ids)
    other.prefill(ids[::-1])
    assert torch.equal(other.fork().decode(ids[0]), other.decode(ids[0]))
    session.rewind(1)
    torch.testing.assert_close(session.decode(ids[-1]), want, atol=1e-3, rtol=1e-3)


def test_prefix_reuse_equals_a_cold_run(tiny_bundle: Path) -> None:
    session, cold = runtime_ref.load(tiny_bundle), runtime_ref.load(tiny_bundle)
    ids = some_ids(session, min(30, session.manifest.max_context_length))
    session.prefill(ids[:18])
    torch.testing.assert_close(session.prefill(ids, reuse=True), cold.prefill(ids), atol=1e-3, rtol=1e-3)


def test_generate_score_and_memory(tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    succeed("generate", "--bundle", tiny_bundle, "--prompt", "Hello", "--max-new-tokens", 6)
    assert "[kv]" in capsys.readouterr().err
    ids = some_ids(runtime_ref.load(tiny_bundle), 12)
    (tmp_path / "ids.json").write_text(json.dumps(ids))
    for name, prefill in (("chunked", 8), ("single", 0)):
        succeed(
            "score", "--bundle", tiny_bundle, "--ids", tmp_path / "ids.json", "--prefill", prefill, "--chunk", 4,
            "--out", tmp_path / name, "--logits",
        )  # fmt: skip
    with np.load(tmp_path / "chunked") as chunked, np.load(tmp_path / "single") as single:
        assert chunked["position"].tolist() == [3, 7, 8, 9, 10, 11]
        np.testing.assert_allclose(chunked["logits"], single["logits"][chunked["position"]], atol=1e-3, rtol=1e-3)
    succeed("memory", "--bundle", tiny_bundle)
    assert "MiB" in capsys.readouterr().out


def test_commands_keep_torch_to_one_thread_beside_the_runtimes_pool(tiny_bundle: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        succeed("generate", "--bundle", tiny_bundle, "--prompt", "hello", "--max-new-tokens", 2)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
