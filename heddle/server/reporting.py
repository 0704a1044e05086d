"""What a server tells its operators, from one place: metrics, its first lines, the periodic one.

planned   note_plan: lines of what will run
loading   note_phase, note_phase, ...: a line of each when it has ended
ready     begin: counts from now on; last lines of the start-up; tasks beside the server
closing   end
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from heddle.config.engine import EngineConfig, ResolvedConfig
from heddle.engine.async_llm import AsyncLLM
from heddle.errors import HeddleError
from heddle.server.config import ServerConfig
from heddle.server.errors import ApiError
from heddle.server.listening import listening_sockets
from heddle.server.logs import StatsLine, log_refusal
from heddle.server.memory_plan import predicted_bytes
from heddle.server.metrics import Metrics
from heddle.server.startup_lines import closing_lines, opening_lines

log = logging.getLogger("heddle.server")


class Reporter:
    """Of one server. Lives in its event loop."""

    def __init__(
        self,
        settings: ServerConfig,
        model_name: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with the first phase.

        Args:
            settings: of the server.
            model_name: as metrics name the model.
            clock: monotonic seconds, for the phases.
        """
        self.metrics = Metrics(model_name, settings.metrics_compat)
        self._settings, self._clock = settings, clock
        self._predicted: dict[int, dict[str, int]] = {}
        self._mark = clock()
        self._tasks: list[asyncio.Task[None]] = []

    def note_plan(self, config: EngineConfig, plan: ResolvedConfig) -> None:
        """Say what will be loaded, and how much of it fits; called in the thread that loads.

        Args:
            config: as it was asked for.
            plan: what will run.
        """
        try:
            self._predicted = predicted_bytes(plan)
        except HeddleError as error:
            log.warning("memory of ranks cannot be told: %s", error)
        for line in opening_lines(config, self._settings, plan, self._predicted):
            log.info("%s", line)

    def note_phase(self, name: str) -> None:
        """A phase of the start-up has ended; the next one begins."""
        now = self._clock()
        log.info("%s: %.2f s", name, now - self._mark)
        self._mark = now

    def note_refusal(self, request_id: str, error: ApiError) -> None:
        """A client got this error."""
        self.metrics.count_refusal(error.code)
        log_refusal(request_id, error.code, error.param)

    async def begin(self, engine: AsyncLLM, *, routes: Sequence[str], url: str) -> None:
        """The engine is warm: count what it does, and say what runs.

        Args:
            engine: its `on_step` is `metrics.on_step`, its executor was given to
                `metrics.watch_executor`.
            routes: paths that are served.
            url: where clients find it.
        """
        await engine.call(partial(self.metrics.attach, engine.llm))
        self.metrics.tell_plan(self._predicted)
        sockets = await asyncio.to_thread(listening_sockets)
        for line in closing_lines(self.metrics.watch.resident_bytes(), routes, url, sockets):
            log.info("%s", line)
        self._start(self.metrics.watch_loop())
        if not self._settings.disable_log_stats:
            self._start(StatsLine(lambda: self.metrics.totals, self.metrics.queues).run())

    async def end(self) -> None:
        """Stop what runs beside the server; a second call does nothing."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks.clear()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.ensure_future(work))
