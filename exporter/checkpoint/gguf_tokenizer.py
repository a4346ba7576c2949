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
from exporter.special_tokens import NO_TOKEN, NamedTokens

# Kinds of token, ``tokenizer.ggml.token_type``.
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
_SPACE = "▁"

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


def _list(metadata: Mapping[str, Any], name: str, kind: type, count: int | None = None) -> list[Any]:
    """The array `name`, of `kind` and with `count` entries if that is known."""
    value = metadata.get(_key(name))
    if not isinstance(value, list):
        raise CheckpointError(
            "tokenizer",
            got=f"GGUF metadata without {_key(name)}",
            expected="a model that carries its tokenizer",
            repair="Convert the model again with its tokenizer.",
        )
    others = [one for one in value if not isinstance(one, kind) or isinstance(one, bool)]
    if others:
        raise _contradiction(f"{others[0]!r} in {_key(name)}", f"an array of {kind.__name__}")
    if count is not None and len(value) != count:
        raise _contradiction(f"{len(value)} entries of {_key(name)}", f"{count}, one for each token")
    return value


def _contradiction(got: str, expected: str) -> CheckpointError:
    return CheckpointError("tokenizer", got=got, expected=expected, repair="Convert the model again.")


def _token(metadata: Mapping[str, Any], name: str) -> int | None:
    """The id ``{name}_token_id``, or None for none.

    Raises:
        CheckpointError: there is no such token.
    """
    id, count = metadata.get(_key(f"{name}_token_id")), len(_tokens(metadata))
    if id is None or (isinstance(id, int) and id in NO_TOKEN):
        return None
    if not isinstance(id, int) or isinstance(id, bool) or not 0 <= id < count:
        raise _contradiction(f"{_key(name)}_token_id {id!r}", f"an id from 0 to {count - 1}")
    return id


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    return _list(metadata, "tokens", str)


def _unsupported(name: str, value: Any, expected: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        "tokenizer",
        got=f"{_key(name)} = {value!r}",
        expected=expected,
        repair="Export from the model's Hugging Face directory, which has a tokenizer.json.",
    )


def _merge(merge: str, vocab: Mapping[str, int]) -> tuple[str, str]:
    """``"left right"``; both, and the two together, are tokens.

    Raises:
        CheckpointError: they are not.
    """
    left, blank, right = merge.partition(" ")
    if not blank or not vocab.keys() >= {left, right, left + right}:
        raise _contradiction(f"the merge {merge!r}", "two tokens of the vocabulary that make a third")
    return left, right


def _byte_level(metadata: Mapping[str, Any], vocab: dict[str, int]) -> Tokenizer:
    pre = metadata.get(_key("pre"))
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        raise _unsupported("pre", pre, f"one of {', '.join(sorted(_PRE_TOKENIZERS))}")
    merges = [_merge(merge, vocab) for merge in _list(metadata, "merges", str)]
    # Llama 3 takes a word that is in the vocabulary whole, whatever the merges say.
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


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
    tokens = _tokens(metadata)
    count = len(tokens)
    merges = score_merges(tokens, _list(metadata, "scores", float, count), _list(metadata, "token_type", int, count))
    unknown = _token(metadata, "unknown")
    tokenizer = Tokenizer(
        BPE(vocab, merges, unk_token=None if unknown is None else tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    replace = normalizers.Replace(" ", _SPACE)
    decode: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get(_key("add_space_prefix"), True):
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
    return bool(metadata.get(_key("add_bos_token"), default)) and _token(metadata, "bos") is not None


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer described by `metadata`; every token keeps the id it has in the file.

    Raises:
        UnsupportedModelError: a kind of tokenizer, or a pattern, that is not known here.
        CheckpointError: a part of the tokenizer is missing.
    """
    model = metadata.get(_key("model"))
    if not isinstance(model, str) or model not in _MODELS:
        raise _unsupported("model", model, f"one of {', '.join(sorted(_MODELS))}")
    tokens = _tokens(metadata)
    types = _list(metadata, "token_type", int, len(tokens))
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise CheckpointError(
            "tokenizer",
            got=f"{len(tokens) - len(vocab)} tokens that occur twice",
            expected="each once",
            repair="Convert the model again.",
        )
    tokenizer = _MODELS[model](metadata, vocab)
    # User-defined tokens are cut out of the raw text before anything else, but they are text: not special.
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [
            AddedToken(token, normalized=False, special=special)
            for token, of in zip(tokens, types, strict=True)
            if of == kind
        ]
        tokenizer.add_tokens(added)
    assert tokenizer.get_vocab_size(with_added_tokens=True) == len(tokens)
    bos = _token(metadata, "bos")
    if adds_bos(metadata) and bos is not None:
        name = tokens[bos]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{name} $A", pair=f"{name} $A {name} $B:1", special_tokens=[(name, bos)]
        )
    return tokenizer


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What ``tokenizer_config.json`` must say for `transformers.AutoTokenizer` to load the same tokenizer."""
    tokens = _tokens(metadata)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds_bos(metadata),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token := _token(metadata, key)) is not None:
            config[f"{name}_token"] = tokens[token]
    return config


def named_tokens(metadata: Mapping[str, Any]) -> list[NamedTokens]:
    """BOS, and every token that ends a generation: end of sequence, of turn, of message."""
    ends = [_token(metadata, name) for name in ("eos", "eot", "eom")]
    return [
        NamedTokens(file="GGUF metadata", bos=_token(metadata, "bos"), eos=[one for one in ends if one is not None])
    ]
