from __future__ import annotations

import threading
import time

import pytest

from heddle.comm.rendezvous import Call, Failure, Hall
from heddle.errors import CollectiveTimeout, PlanMismatch, RankFailed
from tests.support.processes import LONG_SECONDS

CALL = Call("all_gather", (2,), "torch.float32")
PAIR = ((0, 1),)


def soon(seconds=LONG_SECONDS):
    return time.monotonic() + seconds


def pair():
    hall = Hall()
    return hall, hall.open("dcp", PAIR, (0, 1))


def until_waiting(meeting):
    """Until a first member has deposited its call."""
    limit = soon()
    while not meeting._rounds and time.monotonic() < limit:
        time.sleep(0.001)
    assert meeting._rounds


def in_thread(function):
    """Run beside the test; join returns what it raised."""
    raised = []

    def body():
        try:
            function()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()

    def join():
        thread.join(2 * LONG_SECONDS)
        assert not thread.is_alive()
        return raised[0] if raised else None

    return join


def test_payloads_come_in_group_order_whoever_is_first():
    _, meeting = pair()
    found = []
    join = in_thread(lambda: found.append(meeting.meet(1, CALL, "b", soon(), "")))
    found.append(meeting.meet(0, CALL, "a", soon(), ""))
    assert join() is None
    assert found == [["a", "b"]] * 2


def test_a_fast_rank_may_open_the_next_round_first():
    _, meeting = pair()
    seen = {0: [], 1: []}

    def body(place, pause):
        for number in range(50):
            time.sleep(pause)
            seen[place].append(meeting.meet(place, CALL, (place, number), soon(), ""))

    join = in_thread(lambda: body(1, 0.0005))
    body(0, 0.0)
    assert join() is None
    assert seen[0] == seen[1] == [[(0, n), (1, n)] for n in range(50)]


@pytest.mark.parametrize(
    "other",
    [
        Call("all_reduce", (2,), "torch.float32"),
        Call("all_gather", (3,), "torch.float32"),
        Call("all_gather", (2,), "torch.float64"),
    ],
)
def test_calls_that_differ_stop_both_and_name_both(other):
    _, meeting = pair()
    join = in_thread(lambda: meeting.meet(0, CALL, 0, soon(), ""))
    until_waiting(meeting)
    with pytest.raises(PlanMismatch) as mine:
        meeting.meet(1, other, 0, soon(), "")
    theirs = join()
    assert isinstance(theirs, PlanMismatch)
    for text in (str(mine.value), str(theirs)):
        assert "dcp call 0: rank 1 makes" in text
        assert f"{other.op} of {other.dtype} {list(other.shape)}" in text
        assert "rank 0 makes all_gather of torch.float32 [2]" in text


def test_a_deadline_names_who_is_missing_and_ends_the_meeting():
    hall = Hall()
    meeting = hall.open("dcp", ((4, 2, 7),), (4, 2, 7))
    started = time.monotonic()
    with pytest.raises(CollectiveTimeout, match=r"rank 2 waited until noon; missing ranks: \[4, 7"):
        meeting.meet(1, CALL, 0, soon(0.1), "noon")
    assert time.monotonic() - started >= 0.1
    with pytest.raises(RankFailed, match="rank 2 failed first: CollectiveTimeout"):
        meeting.meet(0, CALL, 0, soon(), "")


def test_a_departed_rank_is_not_waited_for():
    hall, meeting = pair()
    join = in_thread(lambda: meeting.meet(0, CALL, 0, soon(), ""))
    until_waiting(meeting)
    hall.leave(1)
    assert "ranks [1] returned without making it" in str(join())


def test_the_first_failure_is_kept_and_wakes_all_meetings():
    hall = Hall()
    pairs = ((0, 1), (2, 3))
    meetings = [hall.open("dcp", pairs, own) for own in pairs]
    joins = [in_thread(lambda m=m: m.meet(0, CALL, 0, soon(), "")) for m in meetings]
    for meeting in meetings:
        until_waiting(meeting)
    cause = KeyError("boom")
    hall.fail(3, cause)
    hall.fail(1, ValueError("later"))
    for join in joins:
        error = join()
        assert isinstance(error, RankFailed)
        assert "rank 3 failed first: KeyError: 'boom'" in str(error)
        assert error.__cause__ is cause


def test_members_may_be_rounds_apart_and_each_round_keeps_its_own():
    _, meeting = pair()
    ahead = [meeting.enter(0, CALL, f"a{number}", soon(), "") for number in range(3)]
    for number in range(3):
        assert meeting.meet(1, CALL, f"b{number}", soon(), "") == [f"a{number}", f"b{number}"]
    # Collected in any order, and after others have come.
    for number in (2, 0, 1):
        assert meeting.collect(ahead[number]) == [f"a{number}", f"b{number}"]
    assert meeting._rounds == {}


def test_a_call_is_compared_with_those_of_its_own_round():
    _, meeting = pair()
    other = CALL._replace(op="shift")
    meeting.enter(0, CALL, "a", soon(), "")
    meeting.enter(0, other, "a", soon(), "")
    meeting.enter(1, CALL, "b", soon(), "")
    with pytest.raises(PlanMismatch, match=r"dcp call 1: rank 1 makes all_gather .* makes shift"):
        meeting.enter(1, CALL, "b", soon(), "")


def test_a_round_that_is_complete_is_collected_after_its_deadline():
    _, meeting = pair()
    ticket = meeting.enter(0, CALL, "a", soon(0.0), "")
    meeting.enter(1, CALL, "b", soon(), "")
    assert meeting.collect(ticket) == ["a", "b"]


def test_pairs_meet_apart_from_the_group_and_from_the_way_back():
    hall, meeting = pair()
    there, back = meeting.pair(0, 1), meeting.pair(1, 0)
    assert meeting.pair(0, 1) is there
    assert len({id(hall.pair("dcp", 0, 1)), id(back), id(meeting), id(hall.pair("pp", 0, 1))}) == 4
    join = in_thread(lambda: there.meet(0, CALL, "a", soon(), ""))
    until_waiting(there)
    hall.fail(1, KeyError("boom"))
    assert "rank 1 failed first" in str(join())


def test_groups_are_formed_from_the_same_lists():
    hall = Hall()
    assert hall.open("dcp", PAIR, (0, 1)) is hall.open("dcp", PAIR, (0, 1))
    assert hall.open("tp", PAIR, (0, 1)) is not hall.open("dcp", PAIR, (0, 1))
    with pytest.raises(PlanMismatch, match="differ from another rank's"):
        hall.open("dcp", ((1, 0),), (1, 0))


def test_an_owner_may_end_a_world_without_naming_a_rank():
    assert str(Failure(None, RankFailed("x")).error()) == "the world was ended: RankFailed: x"
