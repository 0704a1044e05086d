"""Lines reach a reader; without one nobody waits."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from heddle.engine.line_sink import PATIENCE_MILLISECONDS, LineSink, dropped_note

FULL = Path("/dev/full")


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    """A read end, and a stream over the write end."""
    read_end, write_end = os.pipe()
    stream = os.fdopen(write_end, "w", buffering=1)
    yield read_end, stream
    os.close(read_end)
    stream.close()


def read_now(read_end: int) -> str:
    os.set_blocking(read_end, False)
    found = b""
    while True:
        try:
            piece = os.read(read_end, 1 << 16)
        except BlockingIOError:
            break
        found += piece
    return found.decode()


def test_lines_arrive_in_order(pipe: tuple[int, TextIO]) -> None:
    sink = LineSink(lambda: pipe[1])
    for line in ("one", "zw\u00f6lf \ud800", "x" * 10_000):
        sink.write(line)
    assert read_now(pipe[0]) == "one\nzw\u00f6lf \\ud800\n" + "x" * 10_000 + "\n"


def test_nobody_waits_for_a_reader_that_does_not_read(pipe: tuple[int, TextIO]) -> None:
    sink = LineSink(lambda: pipe[1])
    started = time.monotonic()
    for number in range(5000):
        sink.write(f"{number:0100d}")
    took = time.monotonic() - started
    assert took < 100 * PATIENCE_MILLISECONDS / 1000, "the patience of one line, not of each"
    before = read_now(pipe[0])
    sink.write("again")
    *whole, torn = before.split("\n")
    assert [int(line) for line in whole] == list(range(len(whole)))
    assert 100 < len(whole) < 5000
    after = read_now(pipe[0]).removeprefix("\n" if torn else "")
    assert after == f"{dropped_note(5000 - len(whole))}\nagain\n"


def test_a_line_that_was_torn_is_ended_before_the_next(pipe: tuple[int, TextIO]) -> None:
    sink = LineSink(lambda: pipe[1])
    sink.write("x" * 1_000_000)  # more than a pipe holds
    assert set(read_now(pipe[0])) == {"x"}
    sink.write("y")
    assert read_now(pipe[0]) == f"\n{dropped_note(1)}\ny\n"


def test_a_full_disk_and_a_reader_that_left_are_no_errors(pipe: tuple[int, TextIO]) -> None:
    with FULL.open("w") as full:
        sink = LineSink(lambda: full)
        sink.write("lost")
        sink._stream = lambda: pipe[1]
        sink.write("kept")
    assert read_now(pipe[0]) == f"{dropped_note(1)}\nkept\n"
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as stream:
        LineSink(lambda: stream).write("to nobody")


def test_a_stream_may_be_in_memory_missing_or_closed() -> None:
    memory = io.StringIO()
    streams: list[TextIO | None] = [None, io.StringIO(), memory]
    closed = streams[1]
    assert closed is not None
    closed.close()
    current = iter(streams)
    stream = [next(current)]
    sink = LineSink(lambda: stream[0])
    sink.write("a")
    stream[0] = next(current)
    sink.write("b")
    stream[0] = next(current)
    sink.write("c")
    assert memory.getvalue() == f"{dropped_note(2)}\nc\n"


def test_the_note_is_in_the_form_of_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    stream: list[TextIO | None] = [None]
    sink = LineSink(lambda: stream[0], lambda count: f'{{"missing": {count}}}')
    sink.write('{"a": 1}')
    stream[0] = sys.stderr
    sink.write('{"a": 2}')
    assert capsys.readouterr().err == '{"missing": 1}\n{"a": 2}\n'
