"""What bytes a token id stands for, in the two ways in which vocabularies write bytes.

Byte-level vocabularies write each byte as one printable character. The others write a space as
U+2581 and a byte that is no character of its own as `<0xE2>`. Any other decoder is refused: without
bytes a stream cannot be exact.
"""

from __future__ import annotations

import json
import re
from typing import Any, Protocol

import tokenizers

from heddle.errors import UnsupportedError

_SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenByteTable(Protocol):
    """Bytes by token id."""

    @property
    def strips_first_space(self) -> bool:
        """Decoding drops one space at the very start of a text."""
        ...

    @property
    def unknown_bytes(self) -> bytes | None:
        """Bytes that have no token; None: whole characters may have none."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token; empty for ids without text."""
        ...


def create_byte_table(tokenizer: tokenizers.Tokenizer) -> TokenByteTable:
    """Choose by the tokenizer's own decoder.

    Raises:
        UnsupportedError: a decoder that is neither of the two ways.
    """
    steps = _decoder_steps(tokenizer)
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        return _ByteLevelTable(tokenizer)
    if "Metaspace" in kinds or any(_is_space_replacement(step) for step in steps):
        return _SpaceMarkTable(tokenizer, any(_strips(step) for step in steps))
    raise UnsupportedError(
        f"tokenizer decoder {' + '.join(kinds) or 'none'}; byte-level and space-mark (ByteLevel, "
        "Metaspace, Replace) decoders are served"
    )


def _decoder_steps(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    # The object has no public fields; its saved form is the JSON of tokenizer.json.
    decoder = json.loads(tokenizer.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    return steps


def _is_space_replacement(step: dict[str, Any]) -> bool:
    return step["type"] == "Replace" and step.get("pattern") == {"String": _SPACE_MARK}


def _strips(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    return step["type"] == "Strip" and step.get("content") == " " and step.get("start", 0) > 0


class _ByteLevelTable:
    strips_first_space = False

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_of = _byte_alphabet()

    @property
    def unknown_bytes(self) -> bytes | None:
        tokens = self._byte_of.items()
        return bytes(byte for token, byte in tokens if self._tokenizer.token_to_id(token) is None)

    def token_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(self._byte_of[character] for character in token)
        except KeyError:  # an added token, written as plain text
            return bytes(token.encode())


class _SpaceMarkTable:
    def __init__(self, tokenizer: tokenizers.Tokenizer, strips_first_space: bool) -> None:
        self._tokenizer = tokenizer
        self.strips_first_space = strips_first_space

    @property
    def unknown_bytes(self) -> bytes | None:
        tokens = (f"<0x{byte:02X}>" for byte in range(256))
        falls_back = getattr(self._tokenizer.model, "byte_fallback", False)
        if falls_back and all(self._tokenizer.token_to_id(token) is not None for token in tokens):
            return b""
        return None

    def token_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        match = _BYTE_TOKEN.fullmatch(token)
        if match:
            return bytes([int(match[1], 16)])
        return bytes(token.replace(_SPACE_MARK, " ").encode())


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level vocabularies.

    Printable Latin-1 bytes stand for themselves; the others follow from U+0100 on, in byte order.
    Source: the byte-level BPE of GPT-2.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }
