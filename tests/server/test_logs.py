"""Log lines: one per record, nothing that was sent can change that; and the line of rates."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.server import logs
from heddle.server.engine_state import QueueState, Totals
from heddle.server.logs import LineFormatter, StatsLine, configure_logging, escaped, log_refusal


def record(message: str, **more: object) -> logging.LogRecord:
    made = logging.LogRecord("heddle.server", logging.WARNING, __file__, 1, message, None, None)
    made.created, made.msecs = 1_764_504_000.25, 250.0
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_both_forms_have_the_same_parts() -> None:
    text = LineFormatter("text", process="rank0 tp0 pcp0 dcp0", epoch=lambda: 2).format(
        record("hello")
    )
    assert text == "2025-11-30T12:00:00.250Z WARNING rank0 tp0 pcp0 dcp0 epoch=2 hello"
    document = json.loads(LineFormatter("json").format(record("hello")))
    assert document == {
        "time": "2025-11-30T12:00:00.250Z",
        "level": "WARNING",
        "process": "driver",
        "epoch": 0,
        "message": "hello",
    }


@given(st.text())
def test_a_record_is_one_line_whatever_it_says(message: str) -> None:
    for form in ("text", "json"):
        line = LineFormatter(form).format(record("%s", args=(message,)))  # type: ignore[arg-type]
        assert len(line.splitlines()) == 1
        assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in line)


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126)))
def test_plain_text_stays_as_it_is(message: str) -> None:
    assert escaped(message) == message


def test_a_traceback_is_the_end_of_its_line() -> None:
    try:
        raise ValueError("boom")
    except ValueError:
        line = LineFormatter().format(record("failed", exc_info=sys.exc_info()))
    assert len(line.splitlines()) == 1
    assert line.endswith("ValueError: boom")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Where lines go; loggers are as before afterwards."""
    names = ("heddle", "uvicorn")
    before = {name: logging.getLogger(name).level for name in names}
    stream = io.StringIO()
    handler = configure_logging("warning", "text", stream)
    yield stream
    for name in names:
        logger = logging.getLogger(name)
        logger.removeHandler(handler)
        logger.setLevel(before[name])
        logger.propagate = True


def test_a_level_holds_for_everything_of_heddle(stream: io.StringIO) -> None:
    logging.getLogger("heddle.access").info("quiet")
    logging.getLogger("heddle.engine").warning("loud")
    logging.getLogger("uvicorn.error").info("not asked for")
    assert [line.split(" ", 1)[1] for line in stream.getvalue().splitlines()] == [
        "WARNING driver epoch=0 loud"
    ]


class Engine:
    """What the line is made from."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.queues = QueueState(0, 0, 0.0)
        self.now = 100.0
        self.line = StatsLine(lambda: self.totals, lambda: self.queues, clock=lambda: self.now)


def test_rates_are_over_the_time_since_the_last_line() -> None:
    engine = Engine()
    engine.totals.num_prompt_tokens, engine.totals.num_generation_tokens = 5000, 200
    engine.totals.num_looked_up_tokens, engine.totals.num_found_tokens = 4000, 1000
    engine.totals.num_steps = 7
    engine.queues = QueueState(3, 2, 0.625, "request 9 waits for a seat: 3 of 3 run")
    engine.now += 10
    assert engine.line.next_line() == (
        "prompt 500.0 tok/s, generation 20.0 tok/s, running 3, waiting 2, KV cache 62.5%, "
        "prefix hits 25.0%; request 9 waits for a seat: 3 of 3 run"
    )
    engine.totals.num_generation_tokens += 50
    engine.totals.num_steps += 1
    engine.queues = QueueState(1, 0, 0.5)
    engine.now += 5
    assert engine.line.next_line() == (
        "prompt 0.0 tok/s, generation 10.0 tok/s, running 1, waiting 0, KV cache 50.0%, "
        "prefix hits -"
    )


def test_an_idle_engine_has_no_line() -> None:
    engine = Engine()
    engine.now += 10
    assert engine.line.next_line() is None
    engine.queues = QueueState(1, 0, 0.1)  # a step that takes long is no idleness
    engine.now += 10
    assert engine.line.next_line() is not None


def test_lines_are_written_until_cancelled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "STATS_INTERVAL_SECONDS", 0.001)
    engine = Engine()
    engine.queues = QueueState(1, 0, 0.1)

    async def run() -> None:
        task = asyncio.ensure_future(engine.line.run())
        while len(caplog.records) < 2:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait({task})

    with caplog.at_level(logging.INFO, "heddle.server"):
        asyncio.run(run())
    assert "running 1" in caplog.text


def test_a_refusal_has_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "heddle.server"):
        log_refusal("abc", "engine_overloaded", None)
        log_refusal("abd", "invalid_value", "temperature")
    assert [r.getMessage() for r in caplog.records] == [
        "request abc refused: engine_overloaded",
        "request abd refused: invalid_value (temperature)",
    ]
