"""The quality suite: its texts, its scores by their definition, and promises that hold on the worst domain."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import SPECS, decoder_of, one_thread, play, states_of, token_ids  # noqa: F401
from toy import BOS, byte_tokenizer

from exporter.errors import ConfigError
from exporter.model.decoder import all_read
from exporter.quality.domains import DOMAINS, PREFIX, Passage, passages_of
from exporter.quality.domains import TEXTS as JUDGED
from exporter.quality.scores import DomainScores
from exporter.quantization.passages import OWN_PASSAGES, TOKENS, calibration
from exporter.quantization.passages import TEXTS as CALIBRATING
from exporter.spec import PRESETS, QUALITY_PROMISES, DomainScore, QualityPromise, TokenizerSpec
from exporter.text.encoder import Encoder
from exporter.verification.quality import logits_by_layers
from runtime_ref.quality import chosen_domains

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"


def encoder_in(folder: Path, *, template: str | None = TEMPLATE, add_bos: bool = True) -> Encoder:
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    spec = TokenizerSpec(bos_token_id=BOS, eos_token_ids=(), add_bos=add_bos, has_chat_template=template is not None)
    return Encoder(folder, spec)


def plain(text: str) -> list[int]:
    """A token for each byte."""
    ids = byte_tokenizer().encode(text, add_special_tokens=False).ids
    assert len(ids) == len(text.encode())
    return list(ids)


def words_of(folder: Path) -> list[str]:
    texts = []
    for file in sorted(folder.iterdir()):
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            text = "\n".join(message["content"] for conversation in json.loads(text) for message in conversation)
        texts.append(text)
    return "\n\n".join(texts).split()


def test_no_text_both_calibrates_and_judges() -> None:
    """No eight words in a row are the same, nor forty characters of scripts without spaces."""
    own, judged = words_of(CALIBRATING), words_of(JUDGED)
    eights = {tuple(own[i : i + 8]) for i in range(len(own) - 7)}
    assert not eights & {tuple(judged[i : i + 8]) for i in range(len(judged) - 7)}
    own_text, judged_text = "".join(own), "".join(judged)
    pieces = {piece for i in range(len(own_text) - 39) if not (piece := own_text[i : i + 40]).isascii()}
    assert not pieces & {judged_text[i : i + 40] for i in range(len(judged_text) - 39)}


def test_every_text_of_the_suite_is_a_domain() -> None:
    assert sorted(domain.file for domain in DOMAINS) == sorted(file.name for file in JUDGED.iterdir())
    assert len({domain.name for domain in DOMAINS}) == len(DOMAINS) >= 8


def test_passages_are_the_text_from_its_beginning(tmp_path: Path) -> None:
    encoder = encoder_in(tmp_path)
    french = next(domain for domain in DOMAINS if domain.name == "French")
    text = (JUDGED / french.file).read_text(encoding="utf-8")
    (whole,) = passages_of(french, encoder, 200, 10_000)
    assert whole.ids == [BOS, *plain(text)][: PREFIX + 200] and whole.positions == 200
    parts = passages_of(french, encoder, 200, 100)  # a context of 100 scores 84 tokens at most
    assert [part.positions for part in parts] == [84, 84, 32]
    assert all(part.ids[0] == BOS and len(part.ids) <= 100 for part in parts)
    joined = [token for part in parts for token in part.ids[1:]]
    assert joined == plain(text)[: len(joined)]


@given(positions=st.integers(1, 300), context=st.integers(2, 400))
def test_as_many_positions_as_asked_for(tmp_path_factory: pytest.TempPathFactory, positions: int, context: int) -> None:
    encoder = encoder_in(tmp_path_factory.mktemp("tokenizer"))
    for domain in DOMAINS[:2]:
        found = passages_of(domain, encoder, positions, context)
        assert sum(one.positions for one in found) == (positions if context > PREFIX else 0)
        assert all(one.positions > 0 and len(one.ids) <= context for one in found)


def test_dialogue_goes_through_the_template_or_is_left_out(tmp_path: Path) -> None:
    dialogue = next(domain for domain in DOMAINS if domain.name == "dialogue")
    conversation = json.loads((JUDGED / dialogue.file).read_text(encoding="utf-8"))[0]
    rendered = "".join(f"<{m['role']}>{m['content']}</s>" for m in conversation)
    assert passages_of(dialogue, encoder_in(tmp_path), 10_000, 10_000)[0].ids == [BOS, *plain(rendered)]
    (tmp_path / "none").mkdir()
    assert passages_of(dialogue, encoder_in(tmp_path / "none", template=None), 100, 1000) == []


def rows(seed: int, count: int = 9, vocab: int = 23) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    want = torch.randn(count, vocab, generator=generator) * 3
    got = want + torch.randn(count, vocab, generator=generator) * 0.3
    return want, got, torch.randint(0, vocab, (count,), generator=generator)


def test_scores_are_those_of_their_definition() -> None:
    want, got, following = rows(0)
    scores = DomainScores("a text")
    scores.add(want[:4], got[:4], following[:4])
    scores.add(want[4:], got[4:], following[4:])
    found = scores.score()
    gaps, kls, nlls, agreed = [], [], [], 0
    for w, g, token in zip(want.numpy().astype(np.float64), got.numpy().astype(np.float64), following, strict=True):
        p, q = np.exp(w) / np.exp(w).sum(), np.exp(g) / np.exp(g).sum()
        kls.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
        nlls.append(-math.log(p[token]))
        gaps.append(math.log(p[token]) - math.log(q[token]))
        agreed += int(p.argmax() == q.argmax())
    want_score = DomainScore(
        domain="a text", positions=9, nll=float(np.mean(nlls)), nll_gap=float(np.mean(gaps)),
        nll_gap_error=float(np.std(gaps, ddof=1) / 3), kl=float(np.mean(kls)),
        kl_error=float(np.std(kls, ddof=1) / 3), kl_p99=float(np.quantile(kls, 0.99)), agreement=agreed / 9,
    )  # fmt: skip
    for key, value in want_score.model_dump().items():
        assert getattr(found, key) == (pytest.approx(value, abs=2e-6) if isinstance(value, float) else value)


def score(domain: str, *, kl: float = 0.0, kl_error: float = 0.0, gap: float = 0.0, error: float = 0.0) -> DomainScore:
    return DomainScore(
        domain=domain, positions=32, nll=3.0, nll_gap=gap, nll_gap_error=error, kl=kl, kl_error=kl_error, kl_p99=kl,
        agreement=1.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ([score("a", kl=0.009), score("b", gap=0.01)], []),
        ([score("a", kl=0.013, kl_error=0.002)], []),
        ([score("a", kl=0.0131, kl_error=0.002), score("b")], ["mean KL divergence 0.0131 ± 0.0020 nats in a"]),
        ([score("a", kl=0.02), score("b", kl=0.03)], ["mean KL divergence 0.0300 ± 0.0000 nats in b and in 1 more"]),
        ([score("a", gap=0.05, error=0.001)], ["NLL gap 0.0500 ± 0.0010 nats in a"]),
        ([score("a", gap=-0.5)], []),
        ([score("a", kl=math.nan)], ["mean KL divergence nan ± 0.0000 nats in a"]),
    ],
)
def test_a_promise_holds_on_the_worst_domain(scores: list[DomainScore], said: list[str]) -> None:
    assert list(QualityPromise(nll=0.01, kl=0.009).broken(scores)) == said


def test_the_presets_that_round_promise_something() -> None:
    assert QUALITY_PROMISES.keys() == PRESETS.keys() - {"none"}
    assert [promise.kl for promise in QUALITY_PROMISES.values()] == sorted(p.kl for p in QUALITY_PROMISES.values())


@pytest.mark.parametrize("name", ["config T", "short convolution", "gemma"])
def test_passages_share_no_state(name: str) -> None:
    """Each has the logits of a run of its own."""
    decoder = decoder_of(SPECS[name])
    passages = [Passage(token_ids(count, seed), 3) for seed, count in enumerate((12, 5, 30, 4))]
    found = torch.cat(list(logits_by_layers(decoder, passages, all_read)))
    assert len(found) == sum(passage.positions for passage in passages)
    start = 0
    for passage in passages:
        alone = play(decoder, passage.ids[:-1], [1] * (len(passage.ids) - 1), states_of(decoder))
        for position in range(passage.first, len(passage.ids)):
            assert (found[start] - alone[position - 1]).abs().max() < 1e-4
            start += 1


def test_calibration_covers_texts_and_conversations(tmp_path: Path) -> None:
    encoder = encoder_in(tmp_path)
    texts = calibration(encoder, 10_000)
    files = sorted(CALIBRATING.glob("*.txt"))
    conversations = json.loads((CALIBRATING / "chat.json").read_text(encoding="utf-8"))
    assert len(texts.passages) == len(files) + len(conversations) and not texts.held_out
    for ids, file in zip(texts.passages, files, strict=False):
        assert ids.dtype == torch.int64 and ids[0].tolist() == [BOS, *plain(file.read_text("utf-8"))][:TOKENS]
    assert all(ids.shape[1] <= 50 for ids in calibration(encoder, 50).passages)
    scripts = {ord(c) // 256 for c in "".join(words_of(CALIBRATING))}
    assert {0x00, 0x04, 0x06, 0x09, 0x0E, 0x30, 0x4E, 0xAC} <= scripts


def test_a_text_of_the_users_calibrates_and_its_last_passage_does_not(tmp_path: Path) -> None:
    encoder = encoder_in(tmp_path)
    own = tmp_path / "own.txt"
    own.write_bytes(bytes(range(32, 127)) * 200)
    found = calibration(encoder, 100, own)
    assert len(found.passages) == OWN_PASSAGES - 1
    assert all(ids.shape == (1, 100) and int(ids[0, 0]) == BOS for ids in found.passages)
    assert list(found.held_out) == [BOS, *plain(own.read_text())[-99:]]
    assert found.passages[0][0, 1:].tolist() == plain(own.read_text())[:99]


@pytest.mark.parametrize(
    ("content", "said"), [(b"too short", "9 tokens"), (b"\xff\xfe" * 900, "utf-8"), (None, "No such file")]
)
def test_a_text_that_cannot_calibrate_is_said_to(tmp_path: Path, content: bytes | None, said: str) -> None:
    own = tmp_path / "own.txt"
    if content is not None:
        own.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as error:
        calibration(encoder_in(tmp_path), 100, own)
    assert "calibration" in str(error.value)


def test_domains_are_chosen_by_name() -> None:
    assert [domain.name for domain in chosen_domains("French; tables, numbers")] == ["French", "tables, numbers"]
    assert chosen_domains(None) == DOMAINS
    with pytest.raises(ConfigError, match="'Klingon'"):
        chosen_domains("Klingon")
