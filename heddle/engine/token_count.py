"""How few tokens a text can have, known from its length alone.

Where tokens together spell the text, byte for byte, none of them covers more than the longest one
does. Few steps of a tokenizer may be between text and tokens for that to hold; of any other it is
said that nothing is known.
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers

_SPACE_MARK = "\u2581"
_NORMALIZERS = frozenset(("Sequence", "Prepend", "Replace", "NFC"))
"""That take nothing away: of NFC that is said of ASCII alone, and of Replace for spaces."""
_PRE_TOKENIZERS = frozenset(("Sequence", "ByteLevel", "Metaspace", "Split", "Digits"))


class TokenCount:
    """Of one tokenizer.

    Args:
        tokenizer: of the library.
        longest_token: bytes of its longest token.
        unknown_bytes: that have no token, and may vanish; None: characters may, too.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, longest_token: int, unknown_bytes: bytes | None
    ) -> None:
        normal = _steps(tokenizer.normalizer, "normalizers")
        self._longest = longest_token
        self._unknown = unknown_bytes
        self._needs_ascii = any(step["type"] == "NFC" for step in normal)
        self._is_known = (
            unknown_bytes is not None
            and all(map(_normalizer_keeps, normal))
            and all(map(_split_keeps, _steps(tokenizer.pre_tokenizer, "pretokenizers")))
            and not any(
                token.lstrip or token.rstrip
                for token in tokenizer.get_added_tokens_decoder().values()
            )
        )

    def at_least(self, text: str) -> int:
        """A count that the text has at least; 0 where nothing is known."""
        if not self._is_known or (self._needs_ascii and not text.isascii()):
            return 0
        size = len(text)  # a character has a byte or more
        if self._unknown:
            size = len(text.encode("utf-8", "replace").translate(None, self._unknown))
        return -(-size // self._longest)


def _steps(part: Any, name: str) -> list[dict[str, Any]]:
    """A step as its saved form says, and those that it consists of."""
    if part is None:
        return []
    return _flat(json.loads(part.__getstate__()), name)


def _flat(step: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [step, *(inner for each in step.get(name, ()) for inner in _flat(each, name))]


def _normalizer_keeps(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        is_space: bool = step["pattern"] == {"String": " "} and step["content"] == _SPACE_MARK
        return is_space
    return step["type"] in _NORMALIZERS


def _split_keeps(step: dict[str, Any]) -> bool:
    return step["type"] in _PRE_TOKENIZERS and step.get("behavior") != "Removed"
