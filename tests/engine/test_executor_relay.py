"""Lines of ranks reach stderr whole, each with its rank's prefix."""

from __future__ import annotations

import os
from datetime import UTC, datetime

import pytest

from heddle.engine.executors.relay import OutputRelay, format_line
from tests.support.processes import nothing_left

NOW = datetime(2026, 11, 29, 22, 41, 7, 123999, UTC)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("INFO weights loaded", "INFO rank1 tp1 pcp0 dcp1 e3 weights loaded"),
        ("ERROR bad", "ERROR rank1 tp1 pcp0 dcp1 e3 bad"),
        ("terminate called", "WARNING rank1 tp1 pcp0 dcp1 e3 terminate called"),
        ("INFORMATION x", "WARNING rank1 tp1 pcp0 dcp1 e3 INFORMATION x"),
    ],
)
def test_line_carries_time_level_rank_and_epoch(line: str, shown: str) -> None:
    assert format_line(line, "rank1 tp1 pcp0 dcp1", 3, NOW) == f"2026-11-29T22:41:07.123Z {shown}"


def test_lines_are_joined_per_rank_and_the_last_needs_no_break(
    capsys: pytest.CaptureFixture[str],
) -> None:
    relay = OutputRelay(["rank0", "rank1"])
    ends = [os.dup(relay.write_end(rank)) for rank in range(2)]
    relay.start()
    os.write(ends[0], b"INFO one ")
    os.write(ends[1], b"INFO uno\nINFO due\n")
    os.write(ends[0], b"line\nraw \xff")
    for end in ends:
        os.close(end)
    relay.close()
    lines = [line.split(" ", 1)[1] for line in capsys.readouterr().err.splitlines()]
    assert [line for line in lines if "rank0" in line] == [
        "INFO rank0 e0 one line",
        "WARNING rank0 e0 raw \\xff",
    ]
    assert [line for line in lines if "rank1" in line] == [
        "INFO rank1 e0 uno",
        "INFO rank1 e0 due",
    ]
    assert relay.tail(0) == "INFO one line\nraw \\xff"


def test_close_does_not_wait_for_a_stranger_that_holds_the_pipe() -> None:
    relay = OutputRelay(["rank0"])
    held = os.dup(relay.write_end(0))
    relay.start()
    os.write(held, b"last words\n")
    relay.close()
    os.close(held)
    assert relay.tail(0) == "last words"


def test_a_relay_that_never_started_frees_its_pipes() -> None:
    with nothing_left():
        OutputRelay(["rank0", "rank1"]).close()
