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


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHit:
    """Leading tokens that need not be computed: whole blocks, then part of one more by copy."""

    unit: int
    """Tokens of a virtual block."""
    blocks: tuple[int, ...] = ()
    """Full blocks to share."""
    copy_source: int = 0
    """Block that holds the next tokens; 0: none."""
    num_copied: int = 0
    """Tokens to copy from the start of `copy_source`."""
    reason: NoHit | None = None
    """Set exactly if `num_tokens` is 0."""
    num_dropped: int = 0
    """Shared tokens given up because no block was free for their copy."""

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV exists already."""
        return len(self.blocks) * self.unit + self.num_copied

    def without_copy(self) -> PrefixHit:
        """The same hit down to whole blocks."""
        return replace(
            self,
            copy_source=0,
            num_copied=0,
            num_dropped=self.num_copied,
            reason=None if self.blocks else NoHit.BELOW_UNIT,
        )

    def explain(self) -> str:
        """Why nothing was hit, with the numbers; empty if something was.

        Example:
            >>> PrefixHit(unit=64, copy_source=3, num_copied=37).without_copy().explain()
            'shared less than the unit: 37 shared, unit 64'
        """
        if self.reason is NoHit.BELOW_UNIT:
            return f"{self.reason.value}: {self.num_dropped} shared, unit {self.unit}"
        return self.reason.value if self.reason else ""
