"""Who holds up whom, and where the ranks' calls part."""

from __future__ import annotations

from typing import Any

from heddle.faults.page import Standing, call_words
from heddle.faults.standing import (
    describe,
    first_difference,
    laggard,
    members_of,
    waits,
    where,
)
from heddle.faults.watch import create_watch
from heddle.layout.mesh import Mesh

GROUPS = {"tp": ((0, 1), (2, 3)), "dcp": ((0, 1, 2, 3),)}
TP = ("all_reduce", "tp", "float32", (2, 8))
DCP = ("all_to_all", "dcp", "float32", (4, 2, 8))


def rank_after(rank: int, calls: list[Any], *, step: int = 3, is_inside: bool = False) -> Standing:
    """A rank that has made calls in a step; it may be inside the last one."""
    watch = create_watch((), rank, 0)
    watch.begin_step(step, "decode")
    for number, what in enumerate(calls):
        watch.begin_call(call_words(*what))
        if not is_inside or number + 1 < len(calls):
            watch.end_call()
    found = watch.page.standing()
    assert found is not None
    return found


def test_the_groups_of_a_mesh() -> None:
    mesh = Mesh(tp_size=2, pcp_size=2, dcp_size=4, pp_size=1, dp_size=1)
    found = members_of(mesh)
    assert set(found) == {kind for kind in found if len(mesh.groups(kind)[0]) > 1}  # type: ignore[arg-type]
    assert sorted(found["dcp"][0]) == [0, 1, 2, 3]


def test_the_laggard_has_the_fewest_calls() -> None:
    three = [rank_after(0, [TP, DCP]), rank_after(1, [TP]), rank_after(2, [TP, DCP])]
    assert laggard(three) == 1
    assert laggard([three[0], three[2]]) is None  # both are as far
    assert laggard([three[1]]) is None
    assert laggard([*three, rank_after(3, [TP, TP, TP], step=2)]) == 3


def test_each_waits_for_those_who_have_not_begun_the_same_call() -> None:
    standings = [
        rank_after(0, [TP, DCP], is_inside=True),
        rank_after(1, [TP, DCP], is_inside=True),
        rank_after(2, [TP], is_inside=True),
        rank_after(3, []),
    ]
    found = waits(standings, GROUPS)
    assert [(wait.rank, wait.call.group, wait.missing) for wait in found] == [
        (0, "dcp", (2, 3)),
        (1, "dcp", (2, 3)),
        (2, "tp", (3,)),
    ]
    assert waits([standings[3]], GROUPS) == []
    # A rank that nobody can see may be anywhere.
    assert waits(standings[:1], GROUPS)[0].missing == (1, 2, 3)
    # One that is in a later step has been there.
    ahead = [standings[2], rank_after(3, [TP], step=4)]
    assert waits(ahead, GROUPS)[0].missing == ()


def test_the_first_difference_is_between_members_of_one_group() -> None:
    wide = ("all_reduce", "tp", "float32", (2, 9))
    alike = [rank_after(0, [TP, DCP]), rank_after(1, [TP, DCP])]
    other_group = [rank_after(2, [wide, DCP]), rank_after(3, [wide, DCP])]
    assert first_difference([*alike, *other_group], GROUPS) is None
    strayed = rank_after(3, [wide, ("all_to_all", "dcp", "bfloat16", (4, 2, 8))])
    found = first_difference([*alike, other_group[0], strayed], GROUPS)
    assert found is not None
    assert (found.step, found.group, found.place) == (3, "dcp", 0)
    assert [call.dtype for call in found.calls if call] == ["float32"] * 3 + ["bfloat16"]


def test_a_slower_rank_is_no_difference_until_the_step_is_over() -> None:
    assert first_difference([rank_after(0, [TP, TP]), rank_after(1, [TP])], GROUPS) is None
    later = []
    for rank, calls in ((0, [TP, TP]), (1, [TP])):
        watch = create_watch((), rank, 0)
        watch.begin_step(3, "decode")
        for what in calls:
            watch.begin_call(call_words(*what))
            watch.end_call()
        watch.begin_step(4, "decode")
        found = watch.page.standing()
        assert found is not None
        later.append(found)
    behind = rank_after(2, [TP])  # it keeps the newest common step at 3
    difference = first_difference([*later, behind], GROUPS)
    assert difference is not None
    assert (difference.members, difference.calls[1]) == ((0, 1), None)
    assert first_difference([], GROUPS) is None


def test_a_send_and_its_receive_are_no_difference() -> None:
    groups = {"pp": ((0, 1),)}
    pair = [
        rank_after(0, [("send", "pp", "float32", (2, 8))]),
        rank_after(1, [("receive", "pp", "float32", (2, 8))]),
    ]
    assert first_difference(pair, groups) is None


def test_words_name_the_laggard_and_what_each_is_inside() -> None:
    standings = [rank_after(0, [TP, DCP], is_inside=True), rank_after(1, [TP])]
    lines = list(describe(standings, ["rank0 a", "rank1 b"]))
    assert lines[0] == (
        "rank0 a: collective, step 3, 2 collectives begun, inside all_to_all over dcp, "
        "[4, 2, 8] float32"
    )
    assert lines[1] == ("rank1 b: decode, step 3, 1 collective begun  <- all others are further")
    assert where(create_watch((), 0, 0).page.standing()) == "import"  # type: ignore[arg-type]
