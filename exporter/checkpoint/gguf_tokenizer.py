"""The tokenizer a GGUF file carries in its metadata, rebuilt with the `tokenizers` library.

Two kinds exist: ``gpt2``, a byte-level BPE whose text is first cut by a pattern the file only names
(``tokenizer.ggml.pre``), and ``llama``, a SentencePiece BPE whose merges follow from the pieces' scores. The patterns
are those of the models' own ``tokenizer.json``; an unknown name is refused, because a wrong cut gives wrong tokens
without any error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from exporter.errors import CheckpointError, UnsupportedModelError
from exporter.text.ends import Claims
from exporter.text.files import library_calls

# Kinds of token, ``tokenizer.ggml.token_type``.
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
_SPACE = "▁"
_NO_TOKEN = 2**32 - 1
"""The -1 of some models' configs, as an unsigned number."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(digits: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    pattern = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{_PUNCTUATION_AND_SPACE}"
    return lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": _split(r"\p{N}{1,3}"),
    "qwen2": _split(r"\p{N}"),
}


def _key(name: str) -> str:
    return f"tokenizer.ggml.{name}"


def _contradiction(got: str, expected: str) -> CheckpointError:
    return CheckpointError(
        "tokenizer", got=got, expected=expected, repair="Convert the model again, tokenizer and all."
    )


def _list(metadata: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    """The list `name`, whose items are of `kind`."""
    value = metadata.get(_key(name))
    if not isinstance(value, list):
        raise CheckpointError(
            "tokenizer",
            got=f"GGUF metadata without {_key(name)}",
            expected="a model that carries its tokenizer",
            repair="Convert the model again with its tokenizer.",
        )
    if odd := [item for item in value if type(item) is not kind]:
        raise _contradiction(f"{odd[0]!r} in {_key(name)}", f"items of type {kind.__name__}")
    return value


def _by_token(metadata: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    """A list with one item a token."""
    value, tokens = _list(metadata, name, kind), len(_list(metadata, "tokens", str))
    if len(value) != tokens:
        raise _contradiction(f"{_key(name)} with {len(value)} items", f"one for each of {tokens} tokens")
    return value


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(_key(name), default)
    if not isinstance(value, bool):
        raise _contradiction(f"{_key(name)} = {value!r}", "true or false")
    return value


def _token(metadata: Mapping[str, Any], name: str) -> int | None:
    """The id `name`_token_id, which some token has; None if the file names none."""
    value, tokens = metadata.get(_key(f"{name}_token_id")), len(_list(metadata, "tokens", str))
    if value is None or value == _NO_TOKEN:
        return None
    if type(value) is int and 0 <= value < tokens:
        return value
    raise _contradiction(f"{_key(name)}_token_id = {value!r}", f"the id of one of {tokens} tokens")


def _unsupported(name: str, value: Any, expected: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        "tokenizer",
        got=f"{_key(name)} = {value!r}",
        expected=expected,
        repair="Export from the model's Hugging Face directory, which has a tokenizer.json.",
    )


def _byte_level(metadata: Mapping[str, Any], vocab: dict[str, int]) -> Tokenizer:
    pre = metadata.get(_key("pre"))
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        raise _unsupported("pre", pre, f"one of {', '.join(sorted(_PRE_TOKENIZERS))}")
    merges = _merges(metadata, vocab)
    # Llama 3 takes a word that is in the vocabulary whole, whatever the merges say.
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(metadata: Mapping[str, Any], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """The listed merges: two tokens, which joined are a third."""
    merges = []
    for merge in _list(metadata, "merges", str):
        left, _, right = merge.partition(" ")
        if not left or not right:
            raise _contradiction(f"merge {merge!r}", "two tokens and a blank between them")
        if unknown := [part for part in (left, right, left + right) if part not in vocab]:
            raise _contradiction(
                f"merge {merge!r} with the unknown token {unknown[0]!r}", "two tokens that make a third"
            )
        merges.append((left, right))
    return merges


def score_merges(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """The merges a scored vocabulary implies: every cut of a normal piece into two normal pieces, best piece first.

    SentencePiece joins the adjacent pair whose joined piece scores highest; equal scores keep the vocabulary's order.
    """
    normal = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == NORMAL}
    merges: list[tuple[str, str]] = []
    for token in sorted(normal, key=lambda token: (-scores[normal[token]], normal[token])):
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        merges += [(left, right) for left, right in cuts if left in normal and right in normal]
    return merges


def _sentencepiece(metadata: Mapping[str, Any], vocab: dict[str, int]) -> Tokenizer:
    for name in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if metadata.get(_key(name)):
            raise _unsupported(name, "set", "a tokenizer that leaves text as it is")
    tokens = _list(metadata, "tokens", str)
    merges = score_merges(tokens, _by_token(metadata, "scores", float), _by_token(metadata, "token_type", int))
    unknown = _token(metadata, "unknown")
    tokenizer = Tokenizer(
        BPE(vocab, merges, unk_token=None if unknown is None else tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    replace = normalizers.Replace(" ", _SPACE)
    decode: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if _flag(metadata, "add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace])
        decode.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(decode)
    return tokenizer


_MODELS = {"gpt2": _byte_level, "llama": _sentencepiece}


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether text begins with BOS; files older than the flag follow llama.cpp's default for their kind."""
    default = metadata.get(_key("model")) == "llama" or metadata.get(_key("pre")) == "llama-bpe"
    return _flag(metadata, "add_bos_token", default) and _token(metadata, "bos") is not None


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer described by `metadata`; every token keeps the id it has in the file.

    Raises:
        UnsupportedModelError: a kind of tokenizer, or a pattern, that is not known here.
        CheckpointError: a part of the tokenizer is missing, or contradicts another.
    """
    model = metadata.get(_key("model"))
    if not isinstance(model, str) or model not in _MODELS:
        raise _unsupported("model", model, f"one of {', '.join(sorted(_MODELS))}")
    tokens, types = _list(metadata, "tokens", str), _by_token(metadata, "token_type", int)
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise CheckpointError(
            "tokenizer",
            got=f"{len(tokens) - len(vocab)} tokens that occur twice",
            expected="each once",
            repair="Convert the model again.",
        )
    with library_calls("a tokenizer that the tokenizers library can build"):
        tokenizer = _MODELS[model](metadata, vocab)
        # User-defined tokens are cut out of the raw text before anything else, but they are text: not special.
        for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
            added = [
                AddedToken(token, normalized=False, special=special)
                for token, of in zip(tokens, types, strict=True)
                if of == kind
            ]
            tokenizer.add_tokens(added)
        if adds_bos(metadata):
            bos = _token(metadata, "bos")
            assert bos is not None
            name = tokens[bos]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{name} $A", pair=f"{name} $A {name} $B:1", special_tokens=[(name, bos)]
            )
    assert tokenizer.get_vocab_size(with_added_tokens=True) == len(tokens)
    return tokenizer


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What ``tokenizer_config.json`` must say for `transformers.AutoTokenizer` to load the same tokenizer."""
    tokens = _list(metadata, "tokens", str)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds_bos(metadata),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token := _token(metadata, key)) is not None:
            config[f"{name}_token"] = tokens[token]
    return config


def claims(metadata: Mapping[str, Any]) -> Claims:
    """What the file says of the begin and the end of a text: every token that ends a sequence, a turn or a message."""
    ids = [_token(metadata, name) for name in ("eos", "eot", "eom")]
    return Claims(bos=_token(metadata, "bos"), eos=tuple(dict.fromkeys(token for token in ids if token is not None)))


def chat_template(metadata: Mapping[str, Any]) -> str | None:
    """The chat template in the file; None if it has none."""
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise _contradiction(f"tokenizer.chat_template = {template!r}"[:100], "a text")
    return template or None
