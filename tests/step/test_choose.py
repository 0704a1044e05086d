"""The cheapest way, and a sentence that compares all."""

from __future__ import annotations

import pytest

from heddle.config.link_costs import LinkCosts
from heddle.step.choose import Way, cheapest
from heddle.step.traffic import Cost

COSTS = LinkCosts(alpha=1e-3, beta=1e6)


def test_seconds_are_calls_bytes_and_arithmetic() -> None:
    way = Way(name="x", cost=Cost(2, 5000), compute_seconds=0.1)
    assert way.seconds(COSTS) == pytest.approx(0.107)


def test_hidden_arithmetic_covers_bytes_and_never_calls() -> None:
    cost = Cost(3, 50_000)
    partly, wholly = (Way(name="x", cost=cost, hidden_seconds=hidden) for hidden in (0.02, 9.0))
    assert partly.seconds(COSTS) == pytest.approx(0.033)
    assert wholly.seconds(COSTS) == pytest.approx(0.003)


def test_the_first_of_equals_wins() -> None:
    ways = [Way(name=name, cost=Cost(1, 100)) for name in ("b", "a")]
    assert cheapest(ways, COSTS)[0].name == "b"


def test_a_single_way_is_told_without_others() -> None:
    assert cheapest([Way(name="a2a", cost=Cost(1, 2000))], COSTS)[1] == (
        "a2a 3000 us (1 call, 2,000 bytes)"
    )
