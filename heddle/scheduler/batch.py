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
    """q, at least 1, drafts included."""
    samples: bool
    """The last known token is among the rows: a token is drawn after it, and after each draft."""
    draft_token_ids: tuple[int, ...] = ()
    """Guesses of the next tokens, in the last rows."""

    @property
    def num_drafts(self) -> int:
        """d: rows that are worth something only if the guess is right."""
        return len(self.draft_token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Rows whose tokens are known: q - d."""
        return self.num_scheduled_tokens - self.num_drafts

    @property
    def num_sampled_rows(self) -> int:
        """Last rows that feed sampling."""
        return 1 + self.num_drafts if self.samples else 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The q tokens to compute."""
        start = self.num_computed_tokens
        known = self.request.token_ids[start : start + self.num_known_tokens]
        return (*known, *self.draft_token_ids)


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
    state_copies: tuple[tuple[int, int], ...] = ()
    """(source, target) slots of recurrent states, copied in this order."""

    @property
    def num_rows(self) -> int:
        """Rows of the step, over all ranks."""
        return sum(part.num_scheduled_tokens for part in self.parts)
