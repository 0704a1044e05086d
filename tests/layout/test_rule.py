"""What rules share."""

from __future__ import annotations

import pytest

from heddle.layout.choice import LayoutChoice
from heddle.layout.rule import is_count, moved, reset_rule
from tests.support.layouts import degrees


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1,), True),
        ((3, 7), True),
        ((1, 0), False),
        ((True,), False),
        ((1.0,), False),
        ((None,), False),
    ],
)
def test_counts_are_positive_whole_numbers(values: tuple[object, ...], expected: bool) -> None:
    assert is_count(*values) is expected


def test_moved_changes_one_setting() -> None:
    found = [choice.parallel for choice in moved(LayoutChoice(), "tensor_parallel_size", [2, 3])]
    assert found == [degrees(2, 1, 1), degrees(3, 1, 1)]


@pytest.mark.parametrize(
    ("setting", "legal", "asked"),
    [("pipeline_parallel_size", 1, 4), ("dcp_q_replicate", False, True)],
)
def test_a_setting_with_one_legal_value(setting: str, legal: object, asked: object) -> None:
    rule = reset_rule(name="x", setting=setting, value=legal, why="of a reason")
    broken = LayoutChoice().with_settings({setting: asked})
    (problem,) = rule.problems(broken)
    assert problem.text == f"{setting}={asked} is not built yet; of a reason"
    assert list(problem.legal) == [legal]
    assert list(rule.mend(broken)) == [LayoutChoice()]
    assert not any(rule.problems(LayoutChoice()))
    assert any(rule.problems(rule.example))


def test_a_size_that_is_no_count_is_left_to_the_first_rule() -> None:
    rule = reset_rule(name="x", setting="pipeline_parallel_size", value=1, why="of a reason")
    assert not any(rule.problems(LayoutChoice().with_settings({"pipeline_parallel_size": 0})))
