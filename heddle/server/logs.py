"""Log lines: one per record, in two forms with the same parts, and the line every ten seconds.

    text   2026-11-30T12:00:00.250Z INFO driver epoch=0 listening on 127.0.0.1:8000
    json   {"time": "2026-11-30T12:00:00.250Z", "level": "INFO", "process": "driver", ...}

Control characters of a message are escaped, so nobody can write a second line, or move the cursor
of a terminal, by what he sends. Prompts, answers and keys are in no line.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TextIO

from heddle.engine.line_sink import LineSink, dropped_note
from heddle.server.config import LogFormat, LogLevel
from heddle.server.engine_state import QueueState, Totals

log = logging.getLogger("heddle.server")
STATS_INTERVAL_SECONDS = 10.0
PROCESS = "driver"
"""The process that serves; ranks have names of their own."""
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(0x20), 0x7F, *range(0x80, 0xA0))}
_ESCAPES |= {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t", 0x2028: "\\u2028"}
_ESCAPES |= {0x2029: "\\u2029"}


def escaped(text: str) -> str:
    r"""A text without control characters and line separators.

    Example:
        >>> escaped("one\ntwo\x1b[2J")
        'one\\ntwo\\x1b[2J'
    """
    return text.translate(_ESCAPES)


class LineFormatter(logging.Formatter):
    """Time, level, process, epoch and message, as text or JSON."""

    def __init__(
        self,
        form: LogFormat = "text",
        *,
        process: str = PROCESS,
        epoch: Callable[[], int] = lambda: 0,
    ) -> None:
        super().__init__()
        self._form, self._process, self._epoch = form, process, epoch

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback is the end of its message."""
        message = record.getMessage()
        if record.exc_info:
            message = f"{message}\n{self.formatException(record.exc_info)}"
        moment = time.gmtime(record.created)
        stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', moment)}.{int(record.msecs):03d}Z"
        if self._form == "json":
            return json.dumps(
                {
                    "time": stamp,
                    "level": record.levelname,
                    "process": self._process,
                    "epoch": self._epoch(),
                    "message": escaped(message),
                },
                ensure_ascii=True,
            )
        where = f"{self._process} epoch={self._epoch()}"
        return f"{stamp} {record.levelname} {where} {escaped(message)}"


class LineHandler(logging.Handler):
    """Writes records to a stream, and never waits for its reader: the event loop must go on."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._sink = LineSink(lambda: stream, self._note)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, or drop it."""
        try:
            self._sink.write(self.format(record))
        except Exception:  # a record that cannot be formatted is no reason to fail
            self.handleError(record)

    def _note(self, count: int) -> str:
        text = dropped_note(count).removeprefix("WARNING ")
        return self.format(logging.LogRecord("heddle", logging.WARNING, "", 0, text, None, None))


def configure_logging(
    level: LogLevel, form: LogFormat, stream: TextIO, epoch: Callable[[], int] = lambda: 0
) -> logging.Handler:
    """Send everything of heddle, and warnings of uvicorn, to a stream.

    Args:
        level: least severe lines that are written.
        form: of the lines.
        stream: where to.
        epoch: life of the ranks at the time of a line.
    Returns:
        The handler, for whoever wants to remove it again.
    """
    handler = LineHandler(stream)
    handler.setFormatter(LineFormatter(form, epoch=epoch))
    for name, least in (("heddle", level.upper()), ("uvicorn", "WARNING")):
        logger = logging.getLogger(name)
        logger.setLevel(least)
        logger.addHandler(handler)
        logger.propagate = False
    return handler


@dataclass(frozen=True, slots=True)
class _Mark:
    """Where the counters were."""

    when: float
    totals: Totals


class StatsLine:
    """The periodic line. Rates are over the time since the last one."""

    def __init__(
        self,
        totals: Callable[[], Totals],
        queues: Callable[[], QueueState],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to measure.

        Args:
            totals: what the engine has done so far.
            queues: who runs and waits now.
            clock: monotonic seconds.
        """
        self._totals, self._queues, self._clock = totals, queues, clock
        self._mark = _Mark(clock(), replace(totals()))

    def next_line(self) -> str | None:
        """The line for the time since the last call; None if nothing was done in it."""
        before = self._mark
        now = self._mark = _Mark(self._clock(), replace(self._totals()))
        seconds = max(now.when - before.when, 1e-9)
        queues = self._queues()
        is_busy = queues.num_running or queues.num_waiting
        if now.totals.num_steps == before.totals.num_steps and not is_busy:
            return None
        prompt = now.totals.num_prompt_tokens - before.totals.num_prompt_tokens
        generated = now.totals.num_generation_tokens - before.totals.num_generation_tokens
        line = (
            f"prompt {prompt / seconds:.1f} tok/s, generation {generated / seconds:.1f} tok/s, "
            f"running {queues.num_running}, waiting {queues.num_waiting}, "
            f"KV cache {100 * queues.kv_usage:.1f}%, {_hit_text(before.totals, now.totals)}"
        )
        return f"{line}; {queues.why_waiting}" if queues.why_waiting else line

    async def run(self) -> None:
        """Write lines until cancelled."""
        while True:
            await asyncio.sleep(STATS_INTERVAL_SECONDS)
            line = self.next_line()
            if line is not None:
                log.info("%s", line)


def _hit_text(before: Totals, now: Totals) -> str:
    looked_up = now.num_looked_up_tokens - before.num_looked_up_tokens
    if not looked_up:
        return "prefix hits -"
    found = now.num_found_tokens - before.num_found_tokens
    return f"prefix hits {100 * found / looked_up:.1f}%"


def log_refusal(request_id: str, code: str, param: str | None) -> None:
    """A request was refused. Its message may repeat a word of what was sent: it is not written."""
    log.info("request %s refused: %s%s", request_id, code, f" ({param})" if param else "")
