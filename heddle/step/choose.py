"""The cheapest of several ways to do the same, by the model of cost, and why.

    seconds = calls * alpha + bytes / beta + exposed compute

Bytes and calls are read off the description of each way (`exchanges`), so what is weighed is what
is sent. A way that sends under its own arithmetic pays only for what that does not hide.

Legend: `n` rows of a class, `S` cached keys they meet, `N` DCP ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heddle.config.link_costs import LinkCosts
from heddle.step.traffic import Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to do something."""

    name: str
    cost: Cost
    compute_seconds: float = 0.0
    """Arithmetic that differs between the ways; what all of them do may be left out."""
    hidden_seconds: float = 0.0
    """Arithmetic under which transfers run."""

    def seconds(self, costs: LinkCosts) -> float:
        """Time of one layer on one rank."""
        bytes_seconds = self.cost.received_bytes / costs.beta
        exposed = max(bytes_seconds - self.hidden_seconds, 0.0)
        return self.cost.calls * costs.alpha + exposed + self.compute_seconds

    def describe(self, costs: LinkCosts) -> str:
        """Name, calls, bytes and time, for the trace."""
        calls = f"{self.cost.calls} call{'s' if self.cost.calls != 1 else ''}"
        return (
            f"{self.name} {self.seconds(costs) * 1e6:.0f} us "
            f"({calls}, {self.cost.received_bytes:,} bytes)"
        )


def cheapest(ways: Sequence[Way], costs: LinkCosts) -> tuple[Way, str]:
    """The way that takes least time, the earliest of equals, and a sentence that compares all.

    Args:
        ways: at least one.
        costs: of the machine.
    Example:
        >>> ways = [Way(name="a", cost=Cost(1, 3000)), Way(name="b", cost=Cost(2, 1000))]
        >>> cheapest(ways, LinkCosts(alpha=1e-4, beta=1e6))[1]
        'b 1200 us (2 calls, 1,000 bytes), not a 3100 us (1 call, 3,000 bytes)'
    """
    best = min(ways, key=lambda way: way.seconds(costs))
    others = ", ".join(way.describe(costs) for way in ways if way is not best)
    return best, best.describe(costs) + (f", not {others}" if others else "")
