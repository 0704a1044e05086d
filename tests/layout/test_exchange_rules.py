"""Rules about exchanges, one by one."""

from __future__ import annotations

from typing import get_args

import pytest

from heddle.config.parallel import CommBackend, ContextExchange
from heddle.layout.choice import LayoutChoice
from heddle.layout.exchange_rules import (
    EXCHANGE,
    IDLE_EXCHANGE,
    PASSED_REPLICA,
    QUERY_REPLICA,
)
from heddle.layout.rule import Rule
from heddle.layout.rules import judge
from tests.support.layouts import degrees


def texts(rule: Rule, choice: LayoutChoice) -> list[str]:
    return [problem.text for problem in rule.problems(choice)]


def sharded(**settings: object) -> LayoutChoice:
    return LayoutChoice(parallel=degrees(2, 2, 4, **settings))


def test_unknown_exchanges_are_named_with_the_known_ones() -> None:
    (problem,) = EXCHANGE.problems(sharded(cp_context_exchange="teleport"))
    assert problem.text == (
        "cp_context_exchange=teleport is not legal; an exchange is one of those that are known"
    )
    assert problem.legal == ("auto", "gather_q", "pass_q", "gather_kv", "ring_kv")


def test_every_pair_of_exchanges_is_legal() -> None:
    """Some ways back mean another one for some rows; the plan says so and none is refused."""
    pairs = [(a, b) for a in get_args(CommBackend) for b in get_args(ContextExchange)]
    assert len(pairs) == 25
    for backend, context in pairs:
        assert judge(sharded(dcp_comm_backend=backend, cp_context_exchange=context)).legal


def test_an_exchange_without_dcp_can_be_dropped_or_given_dcp() -> None:
    idle = LayoutChoice(parallel=degrees(2, 1, 1, dcp_comm_backend="ag_rs"))
    assert texts(IDLE_EXCHANGE, idle) == [
        "dcp_comm_backend=ag_rs is not legal with decode_context_parallel_size=1; an exchange "
        "needs DCP above 1, so drop dcp_comm_backend or raise decode_context_parallel_size"
    ]
    dropped, raised = IDLE_EXCHANGE.mend(idle)
    assert dropped.parallel == degrees(2, 1, 1)
    assert raised.parallel == degrees(2, 1, 2, dcp_comm_backend="ag_rs")


@pytest.mark.parametrize(
    ("sizes", "legal"),
    [
        ((2, 1, 2), True),
        ((2, 2, 4), True),
        ((4, 2, 4), True),
        ((2, 1, 1), False),
        ((2, 2, 2), False),
        ((1, 4, 4), False),
        ((2, 4, 2), False),
    ],
    ids=str,
)
def test_queries_are_replicated_among_tp_ranks_of_a_group(
    sizes: tuple[int, int, int], legal: bool
) -> None:
    choice = LayoutChoice(parallel=degrees(*sizes, dcp_q_replicate=True))
    assert (texts(QUERY_REPLICA, choice) == []) == legal
    assert judge(choice).legal == legal
    mends = [mend.parallel for mend in QUERY_REPLICA.mend(choice)]
    assert mends[0] == degrees(*sizes)
    tp, pcp, _ = sizes
    assert all(mend.decode_context_parallel_size > pcp for mend in mends[1:])
    assert len(mends) > 1 or tp == 1


def test_replicated_queries_are_not_passed_on() -> None:
    choice = sharded(dcp_q_replicate=True, cp_context_exchange="pass_q")
    assert texts(PASSED_REPLICA, choice) == [
        "cp_context_exchange=pass_q is not legal with dcp_q_replicate=True; queries that every "
        "rank of a slice projects need not be passed on"
    ]
    first = judge(choice).nearest[0].flags
    assert first == "-tp 2 -pcp 2 -dcp 4 --cp-context-exchange auto --dcp-q-replicate"
    for context in ("auto", "gather_q", "gather_kv", "ring_kv"):
        assert judge(sharded(dcp_q_replicate=True, cp_context_exchange=context)).legal
