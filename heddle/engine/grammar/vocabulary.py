"""A tokenizer's vocabulary as llguidance wants it: the bytes of every id.

    ids      0 .. vocab_size - 1, and one more that stands for the end of the grammar
    special  has no text: permitted only where a grammar names it

Which real ids may end an answer depends on the request, so the library is told of an end that no
model can draw, and `Matcher` puts the real ones in its place.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from heddle.engine.grammar.trial import PlainTokens

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from heddle.engine.text import TokenBytes

_LONGEST_TOKEN = 512
_SPECIAL_MARK = b"\xff"


class Vocabulary:
    """Made once per engine; costs about half a second for 128,000 tokens.

    Args:
        tokenizer: of the model.
        vocab_size: of the model, in tokens; ids without text are never permitted.
        eos_token_ids: end an answer, so they are no text, whatever the tokenizer says.
    """

    def __init__(
        self, tokenizer: TokenBytes, vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        self.vocab_size = vocab_size
        self.strips_first_space = tokenizer.strips_first_space
        self._eos_token_ids = frozenset(eos_token_ids)
        self._tokenizer = tokenizer
        self.tokens = [_usable(tokenizer.token_bytes(token_id)) for token_id in range(vocab_size)]
        """Bytes by id; empty for ids without text."""

    @property
    def mask_bytes(self) -> int:
        """Length of a mask: whole 32-bit words."""
        return (self.vocab_size + 31) // 32 * 4

    @cached_property
    def real_bits(self) -> npt.NDArray[np.uint8]:
        """The mask of all ids of the model: the last word may be longer."""
        return self.bits(range(self.vocab_size))

    def plain(self) -> PlainTokens:
        """The same in another process."""
        return PlainTokens(
            tokens=self.tokens,
            special_ids=set(filter(self.is_special, range(self.vocab_size))),
            strips_first_space=self.strips_first_space,
        )

    def has_text(self, token_id: int) -> bool:
        """True for ids that add to the text of an answer."""
        return bool(self.tokens[token_id]) and not self.is_special(token_id)

    @cached_property
    def spaced(self) -> dict[int, list[int] | None]:
        """Ids whose text begins with a space, and how the rest of it is spelled."""
        return {
            token_id: self.spell(data[1:])
            for token_id, data in enumerate(self.tokens)
            if data.startswith(b" ") and not self.is_special(token_id)
        }

    def spell(self, data: bytes) -> list[int] | None:
        """Ids whose bytes together are `data`, the longest first; None if there are none."""
        ids: list[int] = []
        while data:
            for end in range(min(len(data), self._longest), 0, -1):
                token_id = self._id_of.get(data[:end])
                if token_id is not None:
                    break
            else:
                return None
            ids.append(token_id)
            data = data[end:]
        return ids

    @cached_property
    def inner(self) -> LLTokenizer:
        """The library's own form."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Tokens(self)))

    def bits(self, token_ids: Collection[int]) -> npt.NDArray[np.uint8]:
        """A mask that permits just these ids."""
        mask = np.zeros(self.mask_bytes, np.uint8)
        for token_id in token_ids:
            mask[token_id >> 3] |= 1 << (token_id & 7)
        return mask

    def is_special(self, token_id: int) -> bool:
        """True for ids that are no text, though they may have a name."""
        return token_id in self._eos_token_ids or self._tokenizer.is_special(token_id)

    @cached_property
    def _id_of(self) -> dict[bytes, int]:
        return {
            data: token_id for token_id, data in enumerate(self.tokens) if self.has_text(token_id)
        }

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._id_of), default=0)


def _usable(data: bytes) -> bytes:
    """Nothing for tokens that the library cannot take as text: those longer than any vocabulary has
    them, and those that begin as its special tokens do, with a byte that is in no text.
    """
    return b"" if len(data) > _LONGEST_TOKEN or data.startswith(_SPECIAL_MARK) else data


class _Tokens:
    """What the library asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        size = vocabulary.vocab_size
        self.eos_token_id = size
        self.tokens = [*vocabulary.tokens, b"<end of the grammar>"]
        self.special_token_ids = [*filter(vocabulary.is_special, range(size)), size]
        self._vocabulary = vocabulary

    def __call__(self, text: bytes) -> list[int]:
        """Any spelling will do: no token is forced."""
        return self._vocabulary.spell(text) or []
