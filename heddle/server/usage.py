"""Fields that every answer has: its identity and what it used."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from heddle.engine.outputs import RequestOutput


@dataclass(frozen=True, slots=True)
class Envelope:
    """Fields that are the same in all chunks of an answer."""

    prefix: str
    """Of the id: `cmpl` or `chatcmpl`."""
    model: str
    fingerprint: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def document(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """An answer or a chunk.

        Args:
            kind: value of `object`.
            choices: in order.
            more: further fields.
        """
        return {
            "id": f"{self.prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            **more,
        }


class Usage:
    """Token counts of a request, over all of its prompts and answers."""

    def __init__(self, *, hides_cached: bool) -> None:
        self._hides_cached = hides_cached
        self._prompts: dict[int, tuple[int, int]] = {}
        self._completion_tokens = 0

    def note(self, index: int, output: RequestOutput) -> None:
        """Count what an output brings; of a prompt only once.

        Args:
            index: of the prompt.
            output: with tokens that were not counted yet.
        """
        self._prompts[index] = (len(output.prompt_token_ids), output.num_cached_tokens)
        self._completion_tokens += sum(len(each.token_ids) for each in output.outputs)

    def document(self) -> Mapping[str, Any]:
        """The `usage` object as of now."""
        prompt_tokens = sum(count for count, _ in self._prompts.values())
        cached = 0 if self._hides_cached else sum(cached for _, cached in self._prompts.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
