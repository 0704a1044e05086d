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
        self._prompts: dict[int, RequestOutput] = {}
        self._completion_tokens = 0

    def note(self, index: int, output: RequestOutput) -> None:
        """Count what an output brings; of a prompt only once.

        Args:
            index: of the prompt.
            output: with tokens that were not counted yet.
        """
        self._prompts[index] = output
        self._completion_tokens += sum(len(each.token_ids) for each in output.outputs)

    def document(self) -> Mapping[str, Any]:
        """The `usage` object as of now."""
        prompts = self._prompts.values()
        prompt_tokens = sum(len(output.prompt_token_ids) for output in prompts)
        details: dict[str, Any] = {"cached_tokens": 0}
        if not self._hides_cached:
            details["cached_tokens"] = sum(output.num_cached_tokens for output in prompts)
            reasons = dict.fromkeys(output.no_hit_reason for output in prompts)
            if not details["cached_tokens"] and any(reasons):
                details["miss_reason"] = "; ".join(filter(None, reasons))
        if any(output.num_pinned_tokens for output in prompts):
            details["pinned_tokens"] = sum(output.num_pinned_tokens for output in prompts)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": details,
        }
