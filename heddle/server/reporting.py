"""What a server tells its operators, from one place: metrics, its first lines, the periodic one.

loading   note_phase, note_phase, ...
ready     begin: counts from now on; lines of the start-up; tasks beside the server
closing   end
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from heddle.config.engine import EngineConfig
from heddle.engine.async_llm import AsyncLLM
from heddle.errors import HeddleError
from heddle.server.config import ServerConfig
from heddle.server.errors import ApiError
from heddle.server.logs import StatsLine, log_refusal
from heddle.server.memory_plan import predicted_bytes
from heddle.server.metrics import Metrics
from heddle.server.startup_lines import startup_lines

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
        self._phases: dict[str, float] = {}
        self._mark = clock()
        self._tasks: list[asyncio.Task[None]] = []

    def note_phase(self, name: str) -> None:
        """A phase of the start-up has ended; the next one begins."""
        now = self._clock()
        self._phases[name], self._mark = now - self._mark, now

    def note_refusal(self, request_id: str, error: ApiError) -> None:
        """A client got this error."""
        self.metrics.count_refusal(error.code)
        log_refusal(request_id, error.code, error.param)

    async def begin(
        self,
        engine: AsyncLLM,
        config: EngineConfig,
        *,
        routes: Sequence[str],
        socket: str,
        url: str,
    ) -> None:
        """The engine is warm: count what it does, and say what runs.

        Args:
            engine: its `on_step` is `metrics.on_step`, its executor was given to
                `metrics.watch_executor`.
            config: as it was asked for.
            routes: paths that are served.
            socket: where the server listens.
            url: where clients find it.
        """
        await engine.call(partial(self.metrics.attach, engine.llm))
        self._start(self._tell(engine, config, routes, socket, url))
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

    async def _tell(
        self, engine: AsyncLLM, config: EngineConfig, routes: Sequence[str], socket: str, url: str
    ) -> None:
        """Beside the server, since it weighs every kind of rank anew."""
        plan = engine.llm.plan
        try:
            predicted = await asyncio.to_thread(predicted_bytes, plan)
        except HeddleError as error:
            log.warning("memory of ranks cannot be told: %s", error)
            predicted = {}
        self.metrics.tell_plan(predicted)
        lines = startup_lines(
            config,
            self._settings,
            plan,
            engine.driver.replicas,
            phases=self._phases,
            predicted=predicted,
            resident=self.metrics.watch.resident_bytes(),
            routes=routes,
            socket=socket,
            url=url,
        )
        for line in lines:
            log.info("%s", line)
