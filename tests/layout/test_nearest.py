"""The search mends one rule after another and prefers small changes."""

from __future__ import annotations

from collections.abc import Iterator

from heddle.layout.choice import LayoutChoice
from heddle.layout.nearest import nearest_choices, nearest_sizes
from tests.support.layouts import degrees


def tp_moves(choice: LayoutChoice) -> Iterator[LayoutChoice]:
    tp, pcp, dcp = choice.degrees
    yield LayoutChoice(parallel=degrees(tp + 1, pcp, dcp))
    yield LayoutChoice(parallel=degrees(1, pcp, dcp))


def pcp_move(choice: LayoutChoice) -> Iterator[LayoutChoice]:
    tp, _, dcp = choice.degrees
    yield LayoutChoice(parallel=degrees(tp, 2, dcp))


def test_sizes_are_near_by_ratio() -> None:
    assert nearest_sizes(3, [1, 2, 4, 8]) == [4, 2]
    assert nearest_sizes(3, [1, 2, 4, 8], limit=4) == [4, 2, 8, 1]
    assert nearest_sizes(0, [2, 1]) == [1, 2]
    assert nearest_sizes(5, []) == []


def test_rules_are_mended_one_after_another() -> None:
    def first_mend(choice: LayoutChoice):
        tp, pcp, _ = choice.degrees
        if tp not in (1, 4):
            return tp_moves
        return pcp_move if pcp != 2 else None

    found = nearest_choices(LayoutChoice(parallel=degrees(2, 1, 1)), first_mend, limit=9)
    # Both change two settings; a factor of 2 (to 1) and one of 2 (to 4) tie, the world decides.
    assert [choice.degrees for choice in found] == [(1, 2, 1), (4, 2, 1)]


def test_fewer_changed_settings_come_first() -> None:
    def first_mend(choice: LayoutChoice):
        if choice.degrees in ((64, 1, 1), (2, 2, 1), (2, 3, 2)):
            return None
        return lambda _: [
            LayoutChoice(parallel=degrees(2, 3, 2)),
            LayoutChoice(parallel=degrees(64, 1, 1)),
            LayoutChoice(parallel=degrees(2, 2, 1)),
        ]

    found = nearest_choices(LayoutChoice(parallel=degrees(2, 1, 1)), first_mend, limit=2)
    assert [choice.degrees for choice in found] == [(2, 2, 1), (64, 1, 1)]


def test_mends_that_undo_each_other_end() -> None:
    def flip(choice: LayoutChoice) -> list[LayoutChoice]:
        return [LayoutChoice(parallel=degrees(3 - choice.degrees[0], 1, 1))]

    assert nearest_choices(LayoutChoice(), lambda _: flip, limit=3) == []
