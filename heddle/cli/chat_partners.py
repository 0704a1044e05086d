"""Who answers in `heddle chat`, and the one of them that is a server elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx2

from heddle.bench.http_load import CHAT
from heddle.bench.http_stream import AnswerFailed, stream_events
from heddle.errors import quoted

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Piece:
    """What an answer brings."""

    text: str
    num_tokens: int
    """Of the answer so far, this piece included."""
    is_reasoning: bool = False
    """Shown, and no part of the answer."""


class Partner(Protocol):
    """Lives in one event loop."""

    name: str

    def answer(self, messages: Sequence[Message]) -> AsyncIterator[Piece]:
        """The next turn, piece by piece; leaving the iteration aborts it.

        Raises:
            HeddleError: it is refused or fails.
        """
        ...

    async def close(self) -> None:
        """Give back what the partner holds."""
        ...


class RemotePartner:
    """A model of an OpenAI-shaped server."""

    def __init__(self, client: httpx2.AsyncClient, name: str, sampling: Mapping[str, Any]) -> None:
        """Talk through a client.

        Args:
            client: of the server; `close` closes it.
            name: of the model there.
            sampling: fields of every request.
        """
        self.name = name
        self._client = client
        self._fields = {
            **sampling,
            "model": name,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def answer(self, messages: Sequence[Message]) -> AsyncIterator[Piece]:
        """The next turn. Tokens are chunks until the server has told their number."""
        body = {**self._fields, "messages": list(messages)}
        num_tokens = 0
        async for event in stream_events(self._client, CHAT, body):
            usage = event.get("usage")
            if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
                yield Piece("", usage["completion_tokens"])
            for delta in _deltas(event):
                reasoning = _text(delta, "reasoning_content") or _text(delta, "reasoning")
                content = _text(delta, "content")
                num_tokens += bool(reasoning or content)
                if reasoning:
                    yield Piece(reasoning, num_tokens, is_reasoning=True)
                if content:
                    yield Piece(content, num_tokens)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def _deltas(event: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What an event adds to each choice.

    Raises:
        AnswerFailed: it is not of OpenAI's shape.
    """
    choices = event.get("choices") or []
    for choice in choices if isinstance(choices, list) else [choices]:
        delta = (choice.get("delta") or {}) if isinstance(choice, dict) else choice
        if not isinstance(delta, dict):
            raise AnswerFailed(f"an event of the stream has the choice {quoted(choice)}")
        yield delta


def _text(delta: Mapping[str, Any], name: str) -> str:
    found = delta.get(name) or ""
    if not isinstance(found, str):
        raise AnswerFailed(f"an event of the stream has the {name} {quoted(found)}")
    return found
