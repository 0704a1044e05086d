"""Blocks that are promised but not yet given.

A window chain may have `R` blocks at once and mostly has fewer; the difference must stay available,
or two half-filled prompts could each hold what the other waits for.

    promised R   |#######....|  held # , outstanding .
    free count   |...............|  at least all that is outstanding

Chains may share blocks, so each block is counted once here, and each chain is promised as if it
shared none: promises then suffice whoever lets go first.
"""

from __future__ import annotations

from collections import Counter


class Reservations:
    """Promises to chains, and the distinct blocks that these hold."""

    def __init__(self) -> None:
        self._promised = 0
        self._held: Counter[int] = Counter()

    @property
    def num_promised(self) -> int:
        """Blocks promised to all chains together."""
        return self._promised

    @property
    def num_outstanding(self) -> int:
        """Blocks that must stay available."""
        return self._promised - len(self._held)

    def promise(self, count: int) -> None:
        """Raise (or, if negative, lower) what is promised."""
        self._promised += count

    def hold(self, block: int) -> None:
        """A chain has taken a block."""
        self._held[block] += 1

    def let_go(self, block: int) -> None:
        """A chain has given a block back."""
        self._held[block] -= 1
        if not self._held[block]:
            del self._held[block]

    def audit(self, promised: int, held: Counter[int]) -> None:
        """Compare with what the chains say.

        Raises:
            AssertionError: the books are wrong.
        """
        if self._promised != promised or self._held != held:
            raise AssertionError(
                f"promised {self._promised}, chains say {promised}; "
                f"held {dict(self._held)}, chains say {dict(held)}"
            )
        if self.num_outstanding < 0:
            raise AssertionError(f"{-self.num_outstanding} blocks are held beyond the promises")
