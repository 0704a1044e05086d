from __future__ import annotations

import pytest

from heddle.errors import ConfigError
from heddle.planner.trace import HASHED_TOKENS, TracedRequest, repeated_share
from heddle.simulator.arrivals import KINDS, Synthetic, made_up, timed


def wanted(kind: str, **fields: object) -> Synthetic:
    values = {"requests": 400, "rate": 4.0, "prompt_len": 8000, "output_len": 100, **fields}
    return Synthetic(kind=kind, **values)  # type: ignore[arg-type]


def times(requests: list[TracedRequest]) -> list[float]:
    return [request.arrival or 0.0 for request in requests]


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_as_asked_for_at_about_the_rate(kind: str) -> None:
    found = made_up(wanted(kind))
    arrivals = times(found)
    assert len(found) == 400
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0.0
    assert arrivals[-1] == pytest.approx(100, rel=0.5)
    assert all(r.prompt_len >= 1 and 50 <= r.output_len <= 150 for r in found)
    assert made_up(wanted(kind)) == found
    assert made_up(wanted(kind, seed=1)) != found


def test_lengths_on_their_own_are_about_those_asked_for() -> None:
    lengths = [request.prompt_len for request in made_up(wanted("poisson"))]
    assert 4000 <= min(lengths) < 5000
    assert 11000 < max(lengths) <= 12000
    assert sum(lengths) / len(lengths) == pytest.approx(8000, rel=0.05)


def test_bursts_come_together() -> None:
    arrivals = times(made_up(wanted("bursts")))
    assert len(set(arrivals)) == 400 / 16


def test_of_growing_prompts_much_came_before() -> None:
    assert repeated_share(made_up(wanted("poisson"))) == 0.0
    assert repeated_share(made_up(wanted("chat"))) > 0.3
    assert repeated_share(made_up(wanted("agent"))) > 0.7


def test_tasks_of_a_kind_share_their_instructions_and_nothing_else() -> None:
    found = made_up(wanted("agent", requests=200))
    heads = {request.prefix_hashes[: 4000 // HASHED_TOKENS] for request in found}
    assert len(heads) == 8
    for request in found:
        assert len(request.prefix_hashes) == -(-request.prompt_len // HASHED_TOKENS)


TRACE = [
    TracedRequest(5, 1, (), 30.0),
    TracedRequest(6, 1, (), 10.0),
    TracedRequest(7, 1, (), 20.0),
]


def test_a_trace_is_put_in_order_and_begins_at_zero() -> None:
    found = timed(TRACE)
    assert [(r.prompt_len, r.arrival) for r in found] == [(6, 0.0), (7, 10.0), (5, 20.0)]
    assert [r.prompt_len for r in timed(TRACE, count=2)] == [6, 7]


def test_a_rate_stretches_times() -> None:
    assert times(timed(TRACE, rate=0.3)) == pytest.approx([0.0, 5.0, 10.0])


def test_without_times_all_are_there_at_once_or_at_a_rate() -> None:
    timeless = [request._replace(arrival=None) for request in TRACE * 100]
    assert times(timed(timeless)) == [0.0] * 300
    spread = times(timed(timeless, rate=3.0))
    assert spread == sorted(spread)
    assert spread[-1] == pytest.approx(100, rel=0.3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "storm"}, "synthetic='storm' is not legal; legal here: poisson, bursts, chat"),
        ({"requests": 0}, r"requests=0 is not legal; it is at least 1 .*\(nearest: 1\)"),
        ({"rate": 0.0}, "rate=0.0 is not legal"),
        ({"rate": float("nan")}, "rate=nan is not legal"),
        ({"rate": 1e-308}, "rate=1e-308 is not legal.* at least 1e-06"),
        ({"output_len": 100_000_000}, r"output_len=100000000 is not legal.*\(nearest: 16777216\)"),
        ({"prompt_len": 0}, "prompt_len=0 is not legal"),
        ({"output_len": -3}, "output_len=-3 is not legal"),
    ],
)
def test_what_cannot_be_made_up_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wanted(**{"kind": "poisson", **fields})  # type: ignore[arg-type]


def test_a_trace_is_not_cut_or_stretched_to_nonsense() -> None:
    with pytest.raises(ConfigError, match="requests=0"):
        timed(TRACE, count=0)
    with pytest.raises(ConfigError, match="rate=-1"):
        timed(TRACE, rate=-1.0)
