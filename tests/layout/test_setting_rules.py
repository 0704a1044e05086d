"""Rules about settings beside the degrees, one by one."""

from __future__ import annotations

import pytest

from heddle.layout.choice import LayoutChoice, ModelFacts
from heddle.layout.setting_rules import (
    IDLE_EXCHANGE,
    INTERLEAVE,
    SLIDING_WINDOW,
    UNBUILT_EXCHANGE,
    WORKSPACE,
)
from tests.support.layouts import degrees


def texts(rule, choice: LayoutChoice) -> list[str]:
    return [problem.text for problem in rule.problems(choice)]


def sharded(**settings: object) -> LayoutChoice:
    return LayoutChoice(parallel=degrees(2, 2, 4, **settings))


@pytest.mark.parametrize("interleave", range(1, 20))
def test_the_interleave_divides_the_block(interleave: int) -> None:
    problems = list(INTERLEAVE.problems(sharded(kv_interleave_size=interleave)))
    assert bool(problems) == (interleave not in (1, 2, 4, 8, 16))
    for problem in problems:
        assert problem.text == (
            f"cp_kv_cache_interleave_size={interleave} is not legal with block_size=16; "
            f"the interleave must divide the block size"
        )
        assert list(problem.legal) == [1, 2, 4, 8, 16]


def test_the_workspace_holds_a_round_of_ownership() -> None:
    assert texts(WORKSPACE, sharded(kv_interleave_size=2, context_workspace_tokens=8)) == []
    small = sharded(kv_interleave_size=2, context_workspace_tokens=7)
    assert texts(WORKSPACE, small) == [
        "context_workspace_tokens=7 is not legal with decode_context_parallel_size=4, "
        "cp_kv_cache_interleave_size=2; a piece of context is at least one round of ownership, "
        "4 x 2 tokens"
    ]
    (mended,) = WORKSPACE.mend(small)
    assert mended.parallel.context_workspace_tokens == 8


@pytest.mark.parametrize("exchange", ["pass_q", "ring_kv", "teleport"])
def test_exchanges_that_are_not_built_are_named(exchange: str) -> None:
    (problem,) = UNBUILT_EXCHANGE.problems(sharded(cp_context_exchange=exchange))
    assert problem.text.startswith(f"cp_context_exchange={exchange} is not built yet")
    assert problem.legal == ("auto", "gather_q", "gather_kv")


def test_built_exchanges_are_accepted() -> None:
    for backend in ("auto", "ag_rs", "ag_ar", "a2a"):
        for exchange in ("auto", "gather_q", "gather_kv"):
            choice = sharded(dcp_comm_backend=backend, cp_context_exchange=exchange)
            assert texts(UNBUILT_EXCHANGE, choice) == texts(IDLE_EXCHANGE, choice) == []


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
    ("window", "asked", "legal"), [(8192, None, False), (8192, 512, True), (8192, 513, False)]
)
def test_the_window_stays_within_the_sliding_window(
    window: int, asked: int | None, legal: bool
) -> None:
    model = ModelFacts(num_query_heads=8, num_kv_heads=2, window=window, sliding_window=512)
    choice = LayoutChoice(max_model_len=asked, model=model)
    problems = texts(SLIDING_WINDOW, choice)
    assert bool(problems) != legal
    for text in problems:
        assert text.startswith(
            f"max_model_len={asked or window} is not legal with this model's sliding_window=512"
        )
    (mended,) = SLIDING_WINDOW.mend(choice)
    assert mended.max_model_len == 512
