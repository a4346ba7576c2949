"""Tiny tokenizers of the kinds that models have: byte-level, and three that put a blank before text."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

BLANK = "\u2581"
CONTROL = ("<bos>", "<eos>", "<turn>")
LETTERS = "abcdefghijklmnopqrstuvwxyz<>/|\n"


def byte_level(*more: AddedToken) -> Tokenizer:
    """The 256 bytes, <bos> 256, <eos> 257, <turn> 258, and `more`."""
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(CONTROL))
    tokenizer.add_tokens(list(more))
    return tokenizer


def _pieces() -> models.BPE:
    words = ["<unk>", *CONTROL, BLANK, *LETTERS, BLANK + "a", "ab", BLANK + "ab", BLANK + BLANK]
    words += [f"<0x{byte:02X}>" for byte in range(256)]
    merges = [(BLANK, "a"), ("a", "b"), (BLANK + "a", "b"), (BLANK, BLANK)]
    vocab = {word: i for i, word in enumerate(words)}
    return models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)


def _undo(*, strip: bool) -> decoders.Decoder:
    last = [decoders.Strip(" ", 1, 0)] if strip else []
    return decoders.Sequence([decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *last])


def metaspace(scheme: str) -> Tokenizer:
    """Pieces with byte fallback; the blank comes before the `first` piece of text, `always` or `never`."""
    tokenizer = Tokenizer(_pieces())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=BLANK, prepend_scheme=scheme, split=False)
    tokenizer.decoder = _undo(strip=scheme != "never")
    tokenizer.add_special_tokens(list(CONTROL))
    return tokenizer


def prepended() -> Tokenizer:
    """As Llama 2's: a normalizer puts the blank before each piece of text between control tokens."""
    tokenizer = Tokenizer(_pieces())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)])
    tokenizer.decoder = _undo(strip=True)
    tokenizer.add_special_tokens(list(CONTROL))
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "metaspace_first": lambda: metaspace("first"),
    "metaspace_always": lambda: metaspace("always"),
    "metaspace_never": lambda: metaspace("never"),
    "prepended": prepended,
}
