"""From token ids to text, piece by piece, so that a stream and a whole answer cannot differ.

Two small machines in a row, one pair per answer:

    ids --Detokenizer--> text --StopMatcher--> text that may be sent

The detokenizer carries *bytes* over, never strings: a character whose bytes are spread over tokens
appears once, whole. The matcher withholds the longest tail that could still become a stop string.
Both release what is left at the end.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

_LONGEST_CHARACTER_BYTES = 4


class TokenBytes(Protocol):
    """What a detokenizer needs of a tokenizer."""

    @property
    def strips_first_space(self) -> bool:
        """Decoding drops one space at the very start (tokenizers that write a space as a mark)."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token stands for; empty for ids without text."""
        ...

    def is_special(self, token_id: int) -> bool:
        """True for tokens that `skip_special_tokens` leaves out."""
        ...


class Detokenizer:
    """Incremental decoding of one answer; its whole state is the bytes of an unfinished character.

    Of the prompt it knows no more than the bytes of a character that the prompt left unfinished.
    """

    def __init__(
        self,
        tokens: TokenBytes,
        *,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokens = tokens
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._seed = _unfinished_bytes(tokens, prompt_token_ids)
        self._has_begun = False

    def push(self, token_id: int) -> str:
        """Text that this token completes; empty while a character is unfinished."""
        if self._skip_special_tokens and self._tokens.is_special(token_id):
            return ""
        data = self._tokens.token_bytes(token_id)
        if not data:
            return ""
        if not self._has_begun:
            data = self._begin(data)
        return self._decoder.decode(data)

    def finish(self) -> str:
        """One replacement mark when the answer ends inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)

    def unfinished(self) -> str:
        """What `finish` would return now; changes nothing."""
        return self._decoder.getstate()[0].decode("utf-8", errors="replace")

    def _begin(self, data: bytes) -> bytes:
        self._has_begun = True
        if self._tokens.strips_first_space and data.startswith(b" "):
            return data[1:]
        # The prompt ended inside a character: its bytes count only if this answer goes on with it.
        return self._seed + data if _continues(self._seed, data) else data


def decode(tokens: TokenBytes, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Text of a whole sequence of ids; bytes that are no valid text become replacement marks."""
    detokenizer = Detokenizer(tokens, skip_special_tokens=skip_special_tokens)
    return "".join([*map(detokenizer.push, token_ids), detokenizer.finish()])


def _unfinished_bytes(tokens: TokenBytes, token_ids: Sequence[int]) -> bytes:
    tail = b""
    for token_id in reversed(token_ids):
        tail = tokens.token_bytes(token_id) + tail
        if len(tail) >= _LONGEST_CHARACTER_BYTES:
            break
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(tail)
    return decoder.getstate()[0]


def _continues(seed: bytes, data: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    try:
        decoder.decode(seed + data[:1])
    except UnicodeDecodeError:
        return False
    return bool(seed)


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that has just been completed."""

    text: str
    """What may still be sent: everything before the stop string, or including it where asked."""
    stop: str


class StopMatcher:
    """Finds stop strings in text that arrives in pieces.

    The match that is complete first wins; of two complete at the same character, the one that began
    first. So the result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""

    def find(self, piece: str) -> StopMatch | None:
        """The match that this piece would complete; changes nothing."""
        text = self._held + piece
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if not found:
            return None
        end, start, stop = min(found)
        return StopMatch(text[: end if self._include_stop else start], stop)

    def push(self, piece: str) -> str:
        """Text that may be sent now; the tail that could still become a stop string stays here."""
        text = self._held + piece
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """Release the tail: nothing can complete it any more."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class TextAssembler:
    """The text of one answer, whether it is streamed or not."""

    def __init__(self, detokenizer: Detokenizer, matcher: StopMatcher) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher

    def push(self, token_id: int, *, may_stop: bool) -> tuple[str, str | None]:
        """Add a token.

        Args:
            token_id: the next token of the answer.
            may_stop: False while `min_tokens` is not reached; what is complete then is just text.
        Returns:
            Text to send, and the stop string if one is complete; after that the assembler is done.
        """
        piece = self._detokenizer.push(token_id)
        match = self._matcher.find(piece) if may_stop else None
        if match is not None:
            return match.text, match.stop
        return self._matcher.push(piece), None

    def push_last(self, token_id: int, *, keep_text: bool) -> tuple[str, str | None]:
        """Add a token that ends the answer by its id; a stop string that its text completes wins.

        Args:
            token_id: a stop id or end-of-text token.
            keep_text: whether its own text belongs to the answer.
        Returns:
            As `push`; nothing is withheld any more.
        """
        without = self._detokenizer.unfinished()
        piece = self._detokenizer.push(token_id) + self._detokenizer.finish()
        match = self._matcher.find(piece)
        if match is not None:
            return match.text, match.stop
        return self._close(piece if keep_text else without), None

    def finish(self) -> str:
        """End the answer: everything that was withheld."""
        return self._close(self._detokenizer.finish())

    def _close(self, piece: str) -> str:
        return self._matcher.push(piece) + self._matcher.finish()
