"""Who waits for an answer, as far as a request says."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from heddle.engine.inputs import PromptInput


class Caller(NamedTuple):
    """Who waits for an answer."""

    request_id: str = ""
    """By which the operator may end it."""
    client: str = ""
    """Digest of the key that was shown; empty: none is needed."""
    deadline: float | None = None
    """Time of the loop at which it is given up; None: never."""

    def own(self, prompt: PromptInput) -> PromptInput:
        """The prompt in a cache that this client shares with nobody."""
        return replace(prompt, cache_salt=f"key {self.client} {prompt.cache_salt or ''}")
