"""A tokenizer from the arrays inside a GGUF file.

Byte-level BPE needs three things: tokens, merges, and how text is cut into words first. The file
names the last by a word (`tokenizer.ggml.pre`); words not in the table below are refused, because a
wrong cut gives other ids without any error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from heddle.errors import ModelFileError, UnsupportedError

_CONTROL, _USER_DEFINED = 3, 4
_PREFIX = "tokenizer.ggml."
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def build_gguf_tokenizer(entries: Mapping[str, object], source: str) -> Tokenizer:
    """Build the tokenizer.

    Args:
        entries: metadata of the file.
        source: path of the file, for messages.
    Raises:
        UnsupportedError: not a byte-level BPE tokenizer, or an unknown way of cutting words.
        ModelFileError: an array is missing, or tokens and merges disagree.
    """
    kind = entries.get(_PREFIX + "model")
    if kind != "gpt2":
        raise UnsupportedError(
            f"{source}: tokenizer model {kind!r} in a GGUF file; only 'gpt2' (byte-level BPE) is "
            "read from GGUF; use the model's folder with its tokenizer.json instead"
        )
    tokens = _array(entries, "tokens", source)
    merges: list[Any] = [
        tuple(str(merge).split(" ", 1)) for merge in _array(entries, "merges", source)
    ]
    try:
        model = models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            fuse_unk=False,
            ignore_merges=_pre(entries) == "llama-bpe",
        )
    except Exception as error:  # the library raises bare Exception for tables that disagree
        reason = " ".join(str(error).split())
        raise ModelFileError(f"{source}: tokens and merges make no tokenizer ({reason})") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(entries, source)
    tokenizer.decoder = decoders.ByteLevel()
    _add_marked_tokens(tokenizer, tokens, _array(entries, "token_type", source))
    if entries.get(_PREFIX + "add_bos_token") is True:
        _prepend_bos(tokenizer, entries, tokens)
    return tokenizer


def gguf_special_tokens(entries: Mapping[str, object]) -> dict[str, str]:
    """Texts of `bos_token`, `eos_token`, `unk_token`, `pad_token`, as far as given."""
    tokens = entries.get(_PREFIX + "tokens")
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    found: dict[str, str] = {}
    for short, long in named.items():
        index = entries.get(f"{_PREFIX}{long}_token_id")
        if isinstance(tokens, list) and isinstance(index, int) and 0 <= index < len(tokens):
            found[f"{short}_token"] = tokens[index]
    return found


def _array(entries: Mapping[str, object], name: str, source: str) -> list[Any]:
    value = entries.get(_PREFIX + name)
    if not isinstance(value, list):
        raise ModelFileError(f"{source}: {_PREFIX}{name} is missing; the tokenizer needs it")
    return value


def _pre(entries: Mapping[str, object]) -> object:
    return entries.get(_PREFIX + "pre", "default")


def _pre_tokenizer(entries: Mapping[str, object], source: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    known: dict[object, list[pre_tokenizers.PreTokenizer]] = {
        "default": [byte_level],
        "gpt-2": [byte_level],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), byte_level],
        "llama-bpe": _split(_LLAMA3),
        "qwen2": _split(_QWEN2),
    }
    parts = known.get(_pre(entries))
    if parts is None:
        names = ", ".join(map(str, known))
        raise UnsupportedError(
            f"{source}: {_PREFIX}pre={_pre(entries)!r} is not known; known: {names}; "
            "use the model's folder with its tokenizer.json instead"
        )
    return parts[0] if len(parts) == 1 else pre_tokenizers.Sequence(parts)


def _split(pattern: str) -> list[pre_tokenizers.PreTokenizer]:
    return [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def _add_marked_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Tokens that are matched as a whole before words are cut; control tokens are special."""
    for kind, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
        marked = [
            AddedToken(token, normalized=False, special=is_special)
            for token, token_type in zip(tokens, types, strict=False)
            if token_type == kind
        ]
        if is_special:
            tokenizer.add_special_tokens(marked)
        else:
            tokenizer.add_tokens(marked)


def _prepend_bos(tokenizer: Tokenizer, entries: Mapping[str, object], tokens: list[str]) -> None:
    bos = gguf_special_tokens(entries).get("bos_token")
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokens.index(bos))]
        )
