"""Rules about sizes, DCP groups and heads, one by one."""

from __future__ import annotations

import pytest

from heddle.layout.choice import LayoutChoice, ModelFacts
from heddle.layout.mesh_rules import DCP, HEAD_RATIO, HEADS, SIZES
from tests.support.layouts import degrees

NINE = ModelFacts(num_query_heads=9, num_kv_heads=3)


def texts(rule, choice: LayoutChoice) -> list[str]:
    return [problem.text for problem in rule.problems(choice)]


@pytest.mark.parametrize("value", [0, -3, 2.0, True, "2", None])
def test_a_size_is_a_whole_number(value: object) -> None:
    choice = LayoutChoice(parallel=degrees(value, 1, 1))  # type: ignore[arg-type]
    assert texts(SIZES, choice) == [
        f"tensor_parallel_size={value!r} is not legal; it is a whole number of at least 1"
    ]
    (mended,) = SIZES.mend(choice)
    assert mended == LayoutChoice()


def test_every_size_is_looked_at() -> None:
    parallel = degrees(
        0,
        0,
        0,
        pipeline_parallel_size=0,
        data_parallel_size=0,
        kv_interleave_size=0,
        context_workspace_tokens=0,
    )
    choice = LayoutChoice(parallel=parallel, block_size=0, max_model_len=0)
    subjects = [text.split("=")[0] for text in texts(SIZES, choice)]
    assert subjects == [
        "tensor_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "cp_kv_cache_interleave_size",
        "block_size",
        "context_workspace_tokens",
        "max_model_len",
    ]


def test_bad_sizes_are_reported_once() -> None:
    choice = LayoutChoice(parallel=degrees(0, 2, 3), model=NINE)
    assert not any(DCP.problems(choice))
    assert not any(HEADS.problems(choice))


def test_an_illegal_dcp_is_mended_on_any_of_the_three_axes() -> None:
    mended = {choice.degrees for choice in DCP.mend(LayoutChoice(parallel=degrees(4, 1, 3)))}
    assert {(4, 1, 2), (4, 1, 4), (3, 1, 3), (6, 1, 3), (4, 3, 3)} <= mended


def test_mending_dcp_by_tp_stays_within_the_heads() -> None:
    choice = LayoutChoice(parallel=degrees(4, 1, 8), model=NINE)
    mended = [choice.degrees for choice in DCP.mend(choice)]
    assert (8, 1, 8) in mended
    assert max(tp for tp, _, _ in mended) <= 9


def test_query_heads_are_a_multiple_of_kv_heads() -> None:
    uneven = LayoutChoice(model=ModelFacts(num_query_heads=10, num_kv_heads=3))
    assert texts(HEAD_RATIO, uneven) == [
        "a model with 10 query heads and 3 kv heads is not legal; query heads must be a multiple "
        "of kv heads; no layout can serve it"
    ]
    assert list(HEAD_RATIO.mend(uneven)) == []
    assert texts(HEAD_RATIO, LayoutChoice(model=NINE)) == []


def test_each_rank_needs_a_query_head() -> None:
    assert texts(HEADS, LayoutChoice(parallel=degrees(9, 1, 1), model=NINE)) == []
    too_wide = LayoutChoice(parallel=degrees(12, 1, 4), model=NINE)
    assert texts(HEADS, too_wide) == [
        "tensor_parallel_size=12 is not legal with 9 query heads and 3 kv heads; "
        "each rank needs a query head"
    ]
    # 9 is the widest; 8 is the widest that keeps dcp 4.
    assert {(9, 1, 4), (8, 1, 4)} <= {choice.degrees for choice in HEADS.mend(too_wide)}
