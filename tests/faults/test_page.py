"""A rank's page: what was written is read back, by others, at any time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from hypothesis import given
from hypothesis import strategies as st

from heddle.config.faults import RANK_PHASES
from heddle.faults.page import (
    NUM_CALLS,
    PAGE_BYTES,
    RankPage,
    call_words,
    create_page,
    look,
    read_page,
)
from tests.support.processes import LONG_SECONDS, nothing_left, seconds_until

WHAT = call_words("all_to_all", "dcp", "float32", (2, 2, 5, 65))


def test_a_fresh_page_says_nothing_and_a_written_one_where_the_rank_stands() -> None:
    page = create_page()
    try:
        assert look(page) is None
        writer = RankPage(3, 1, os.dup(page))
        for phase in RANK_PHASES:
            writer.stand(phase, 7, layer=2)
            standing = look(page)
            assert standing is not None
            assert standing == writer.standing()
            assert (standing.rank, standing.epoch, standing.step) == (3, 1, 7)
            assert (standing.phase, standing.layer, standing.calls) == (phase, 2, ())
    finally:
        os.close(page)


def test_a_page_is_given_back() -> None:
    with nothing_left():
        page = create_page()
        RankPage(0, 0, os.dup(page))
        os.close(page)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["all_gather", "all_reduce", "shift", "receive"]),
            st.sampled_from(["tp", "slice", "ep"]),
            st.sampled_from(["float32", "bfloat16", "int64"]),
            st.lists(st.integers(0, 2**32 - 1), max_size=6).map(tuple),
        ),
        max_size=20,
    ),
    st.integers(0, 2**33),
)
def test_calls_are_read_back_in_order(calls: list[tuple[str, str, str, tuple[int, ...]]], step):
    page = RankPage()
    page.stand("decode", step)
    for number, what in enumerate(calls):
        page.begin_call(step, number, -1, call_words(*what))
        standing = page.standing()
        assert standing is not None
        assert standing.phase == "collective"
        assert standing.num_collectives == number + 1
        page.end_call()
    standing = page.standing()
    assert standing is not None
    assert standing.phase == "decode"
    found = [(call.op, call.group, call.dtype, call.shape) for call in standing.calls]
    assert found == calls
    assert {call.step for call in standing.calls} <= {step}
    assert all(call.ended is not None and call.ended >= call.begun for call in standing.calls)


def test_the_ring_keeps_the_last_calls_across_steps() -> None:
    page = RankPage()
    steps, per_step = NUM_CALLS // 100 + 3, 100
    for step in range(steps):
        page.stand("decode", step)
        for number in range(per_step):
            page.begin_call(step, number, number // 50, WHAT)
            page.end_call()
    standing = page.standing()
    assert standing is not None
    assert len(standing.calls) == NUM_CALLS
    places = [(call.step, call.number) for call in standing.calls]
    whole = [(step, number) for step in range(steps) for number in range(per_step)]
    assert places == whole[-NUM_CALLS:]
    assert standing.layer == 1
    assert standing.open_call is None


def test_a_call_that_has_not_come_back_shows_but_not_in_the_next_step() -> None:
    page = RankPage()
    page.stand("decode", 4)
    page.begin_call(4, 0, 0, WHAT)
    standing = page.standing()
    assert standing is not None
    assert standing.open_call is not None
    assert standing.open_call.words == "all_to_all over dcp, [2, 2, 5, 65] float32"
    page.stand("decode", 5)
    later = page.standing()
    assert later is not None
    assert (later.phase, later.num_collectives) == ("decode", 0)


def test_what_a_page_has_no_words_for_is_noted_too() -> None:
    page = RankPage()
    page.begin_call(0, 0, -1, call_words("all_gather", "dcp", "no such dtype", (7, *[1] * 7)))
    standing = page.standing()
    assert standing is not None
    assert standing.calls[-1].dtype == "unknown"
    assert standing.calls[-1].shape == (7, 1, 1, 1, 1, 1)


def test_bytes_of_others_are_no_page() -> None:
    assert read_page(bytes(PAGE_BYTES)) is None
    assert read_page(b"\xff" * PAGE_BYTES) is None


def test_a_stopped_rank_is_read_and_its_heartbeat_grows_old() -> None:
    page = create_page()
    code = (
        "import sys, time\n"
        "from heddle.faults.page import RankPage, start_heartbeat\n"
        f"page = RankPage(1, 0, {page})\n"
        "start_heartbeat(page)\n"
        "page.stand('decode', 9)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[page])
    try:

        def stands(step: int) -> bool:
            standing = look(page)
            return standing is not None and standing.step == step

        assert seconds_until(lambda: stands(9)) < LONG_SECONDS
        time.sleep(0.6)
        beating = look(page)
        assert beating is not None
        assert 0 < beating.heartbeat_age < time.monotonic() - beating.since  # it has beaten since
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.1)
        first = look(page)
        time.sleep(0.5)
        second = look(page)
        assert first is not None
        assert second is not None
        assert second.heartbeat_age >= first.heartbeat_age + 0.5
        process.kill()
        process.wait()
        assert stands(9)  # also of the dead
    finally:
        process.kill()
        process.wait()
        os.close(page)


def test_a_note_costs_little() -> None:
    """Microseconds, printed; the ceiling is far above what any machine needs."""
    page, count = RankPage(), 20_000
    began = time.thread_time()
    for number in range(count):
        page.begin_call(1, number, 0, WHAT)
        page.end_call()
    each = (time.thread_time() - began) / count
    print(f"a call begun and ended: {each * 1e6:.2f} us")
    assert each < 100e-6
