"""Log-probabilities in the two shapes of the API."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from heddle.engine.outputs import Logprob, PositionLogprobs
from heddle.engine.text import Detokenizer
from heddle.engine.tokenizer import Tokenizer

LOWEST = -9999.0
"""In place of minus infinity, which JSON cannot write."""


class TokenNames:
    """How tokens are written in an answer."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    def text(self, token_id: int, logprob: Logprob | None) -> str:
        """The token's own text, or `token_id:N`."""
        if self._as_ids:
            return f"token_id:{token_id}"
        if logprob is not None and logprob.decoded_token is not None:
            return logprob.decoded_token
        return self.data(token_id).decode("utf-8", errors="replace")

    def data(self, token_id: int) -> bytes:
        """The bytes that it stands for."""
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)


class TextOffsets:
    """Where tokens begin in their text, however many of them come at once.

    Counted are whole characters: all tokens of one character begin where it does. What a stop
    string cuts off is counted as if it were there.
    """

    def __init__(self, detokenizer: Detokenizer | None, first: int = 0) -> None:
        """Begin.

        Args:
            detokenizer: new, as that of the text; None: there is no text.
            first: characters in front.
        """
        self._detokenizer = detokenizer
        self._offset = first

    def take(self, token_ids: Sequence[int]) -> list[int]:
        """Characters in front of each of the next tokens."""
        found = []
        for token_id in token_ids:
            found.append(self._offset)
            if self._detokenizer is not None:
                self._offset += len(self._detokenizer.push(token_id))
        return found


def spelled_range(tokenizer: Tokenizer, text: str, token_ids: Sequence[int]) -> tuple[int, int]:
    """Which tokens of a prompt spell its text: all but special ones that were added around it.

    Args:
        tokenizer: of the model.
        text: that was given.
        token_ids: of it.
    Returns:
        [first, end) in `token_ids`; special tokens that the text itself names are inside.
    """
    first, end = 0, len(token_ids)
    extra = len(tokenizer.decode(token_ids, skip_special_tokens=False)) - len(text)

    def was_added(token_id: int) -> bool:
        nonlocal extra
        size = len(tokenizer.decode([token_id], skip_special_tokens=False))
        if not tokenizer.is_special(token_id) or not 0 < size <= extra:
            return False
        extra -= size
        return True

    while first < end and was_added(token_ids[first]):
        first += 1
    while first < end and was_added(token_ids[end - 1]):
        end -= 1
    return first, end


def completion_logprobs(
    positions: Sequence[PositionLogprobs | None],
    token_ids: Sequence[int],
    names: TokenNames,
    offsets: Sequence[int],
) -> dict[str, Any]:
    """The `logprobs` of a text completion.

    Args:
        positions: one per token; None where there is no value (the first of a prompt).
        token_ids: the tokens.
        names: of tokens.
        offsets: characters in front of each token.
    """
    tokens, values, tops = [], [], []
    for token_id, position in zip(token_ids, positions, strict=True):
        chosen = None if position is None else position[token_id]
        tokens.append(names.text(token_id, chosen))
        values.append(None if chosen is None else finite(chosen.logprob))
        tops.append(None if position is None else _by_text(position, names))
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": list(offsets),
    }


def chat_logprobs(
    positions: Sequence[PositionLogprobs],
    token_ids: Sequence[int],
    count: int,
    names: TokenNames,
) -> dict[str, Any]:
    """The `logprobs` of a chat choice.

    Args:
        positions: one per token.
        token_ids: the tokens.
        count: alternatives that were asked for; with any, the chosen token is among them.
        names: of tokens.
    """
    items = []
    for token_id, position in zip(token_ids, positions, strict=True):
        tops = sorted(position.items(), key=lambda entry: entry[1].rank) if count else []
        items.append(
            {
                **_item(token_id, position[token_id], names),
                "top_logprobs": [_item(*top, names) for top in tops],
            }
        )
    return {"content": items}


def prompt_logprobs_of(
    positions: Sequence[PositionLogprobs | None],
) -> list[dict[str, dict[str, Any]] | None]:
    """The `prompt_logprobs` of an answer: by token id, the first one null."""
    return [
        None
        if position is None
        else {
            str(token_id): {
                "logprob": finite(found.logprob),
                "rank": found.rank,
                "decoded_token": found.decoded_token,
            }
            for token_id, found in position.items()
        }
        for position in positions
    ]


def finite(logprob: float) -> float:
    """A number that JSON can write."""
    return logprob if math.isfinite(logprob) else LOWEST


def _by_text(position: PositionLogprobs, names: TokenNames) -> dict[str, float]:
    """Alternatives and the chosen token by text; of two with equal text the likelier."""
    found: dict[str, float] = {}
    for token_id, logprob in position.items():
        text = names.text(token_id, logprob)
        found[text] = max(found.get(text, -math.inf), finite(logprob.logprob))
    return found


def _item(token_id: int, found: Logprob, names: TokenNames) -> dict[str, Any]:
    return {
        "token": names.text(token_id, found),
        "logprob": finite(found.logprob),
        "bytes": list(names.data(token_id)),
    }
