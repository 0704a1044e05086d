"""What runs in one step: the outcome of `Scheduler.schedule`."""

from __future__ import annotations

from dataclasses import dataclass

from heddle.kvcache.copies import BlockCopy
from heddle.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledPart:
    """Rows [C, C + q) of one request."""

    request: Request
    num_computed_tokens: int
    """C, as it was when the step was scheduled."""
    num_scheduled_tokens: int
    """q, at least 1."""
    samples: bool
    """The last row is that of the last known token, so a token is drawn from it."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The q tokens to compute."""
        start = self.num_computed_tokens
        return tuple(self.request.token_ids[start : start + self.num_scheduled_tokens])


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """Parts of a step, and what happens to blocks before its first write."""

    parts: tuple[ScheduledPart, ...]
    """Decodes first, then short prompts, then shares of long ones; each by arrival."""
    copies: tuple[BlockCopy, ...] = ()
    """Done after the wipes; no source is a target."""
    preempted: tuple[int, ...] = ()
    """Ids of requests that lost their blocks to older ones."""
    wiped_blocks: tuple[int, ...] = ()
    """Blocks to overwrite with zeros."""

    @property
    def num_rows(self) -> int:
        """Rows of the step, over all ranks."""
        return sum(part.num_scheduled_tokens for part in self.parts)
