"""What the prefix cache has for a prompt, and why if it has nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class NoHit(StrEnum):
    """The reasons for a hit of zero tokens; there are no others."""

    NOTHING_SHARED = "nothing shared"
    BELOW_UNIT = "shared less than the unit"
    EVICTED = "evicted"
    EXCLUDED = "feature excluded"


@dataclass(frozen=True, slots=True)
class GroupHit:
    """A hit in one cache group."""

    blocks: tuple[int, ...] = ()
    """Full blocks to share, from position 0 on; 0 where no query to come sees the block."""
    copy_source: int = 0
    """Block that holds the next tokens; 0: none."""
    num_copied: int = 0
    """Tokens to copy from the start of `copy_source`."""

    @property
    def shared(self) -> tuple[int, ...]:
        """Blocks that the hit needs, the source of the copy last."""
        blocks = tuple(block for block in self.blocks if block)
        return (*blocks, self.copy_source) if self.num_copied else blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHit:
    """Leading tokens that need not be computed, in every cache group and every recurrent layer."""

    unit: int
    """Tokens of a virtual block (of the first group), or between snapshots."""
    num_tokens: int = 0
    """Tokens whose KV and state exist already."""
    groups: tuple[GroupHit, ...] = ()
    """One per cache group, also where nothing was hit."""
    snapshot: int = 0
    """Slot that holds the recurrent state after `num_tokens` tokens; 0: none is needed."""
    start_rank: int = 0
    """`u` of the chains that were hit."""
    reason: NoHit | None = None
    """Set exactly if `num_tokens` is 0."""
    num_dropped: int = 0
    """Shared tokens given up: no block was free for their copy, or no snapshot lies at or below."""
    whole: PrefixHit | None = None
    """The best hit without a copy, where this one has copies."""

    @property
    def num_copied(self) -> int:
        """Tokens that some group copies."""
        return max((hit.num_copied for hit in self.groups), default=0)

    def without_copy(self) -> PrefixHit:
        """The best hit down to whole blocks."""
        if self.whole is None:
            return self
        num_dropped = self.num_tokens - self.whole.num_tokens
        reason = None if self.whole.num_tokens else NoHit.BELOW_UNIT
        return replace(self.whole, num_dropped=num_dropped, reason=reason)

    def explain(self) -> str:
        """Why nothing was hit, with the numbers; empty if something was.

        Example:
            >>> PrefixHit(unit=64, num_dropped=37, reason=NoHit.BELOW_UNIT).explain()
            'shared less than the unit: 37 shared, unit 64'
        """
        if self.reason is NoHit.BELOW_UNIT:
            return f"{self.reason.value}: {self.num_dropped} shared, unit {self.unit}"
        return self.reason.value if self.reason else ""
