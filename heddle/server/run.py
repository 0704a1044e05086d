"""`heddle serve`: listen first, load behind the door, be ready when real steps have run, drain.

bind --> load (thread) --> warm up --> self-check --> ready --> SIGTERM --> drain --> closed
  |________ /health 503 ____________________________| 200                  second signal: abort
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import uvloop
from starlette.routing import Route

from heddle.config.engine import EngineConfig
from heddle.engine.async_llm import AsyncLLM
from heddle.engine.executors.launch_info import LaunchInfo
from heddle.engine.llm import LLM, OnPlan, Watch
from heddle.engine.machine import resolve_here
from heddle.engine.room import check_room, needed_descriptors, raise_descriptor_limit
from heddle.errors import HeddleError, counted
from heddle.server.admin import create_admin_app
from heddle.server.app import NOT_BUILT, create_app
from heddle.server.config import ServerConfig, read_keys
from heddle.server.guard import OPEN_PATHS, Guard, KeyRing
from heddle.server.health import DeepHealth
from heddle.server.http import SPARE_CONNECTIONS, HttpServer, http_server
from heddle.server.listening import listeners, url_of
from heddle.server.loading import load_checked
from heddle.server.logs import configure_logging
from heddle.server.reporting import Reporter
from heddle.server.serving import Phase, Serving
from heddle.server.startup_lines import exposure_warnings
from heddle.server.tools import check_parser_names
from heddle.server.warmup import warm_up

log = logging.getLogger("heddle.server")
INTERRUPTED = 130
"""Exit code of a second signal while the model loads."""

METRICS_PATH = "/metrics"

Load = Callable[[Watch, OnPlan], LLM]
"""Takes a watch between driver and ranks, and who is told of the plan."""
OnReady = Callable[[Serving, str], None]
"""Told once: what is served, and its URL."""


def serve(
    config: EngineConfig,
    settings: ServerConfig,
    *,
    launch: LaunchInfo | None = None,
    on_ready: OnReady,
) -> int:
    """Serve until a signal; returns the exit code.

    Args:
        config: of the engine.
        settings: of the server.
        launch: what a launcher told this process.
        on_ready: told when requests are taken.
    Raises:
        ConfigError: the address cannot be had, or keys cannot be read.
        HeddleError: the engine did not start.
    """
    keys = KeyRing(read_keys(settings.api_key, settings.api_key_file))
    serving = Serving(settings, config.model)
    serving.check()
    check_parser_names(settings)
    # What is refused is refused before anything starts.
    resolved = resolve_here(config, launch)
    raise_descriptor_limit(settings.max_connections + needed_descriptors(resolved))
    check_room(resolved, launch)
    configure_logging(
        settings.log_level, settings.log_format, sys.stderr, epoch=lambda: serving.epoch
    )
    for line in exposure_warnings(settings, resolved, launch):
        log.warning("%s", line)
    with listeners(settings) as (listener, admin_listener):
        load = partial(load_checked, config, settings.self_check, launch, _say)

        def load_all(watch: Watch, on_plan: OnPlan) -> LLM:
            llm = load(watch, on_plan)
            tokenizer = llm.get_tokenizer()
            if serving.template or (tokenizer is not None and tokenizer.has_chat_template):
                serving.templates.warm()
            return llm

        server = Server(
            load_all,
            config,
            serving,
            keys,
            listener,
            admin_listener=admin_listener,
            on_ready=on_ready,
            say=_say,
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_until_signals(server))


def _say(line: str) -> None:
    log.info("%s", line)


class Server:
    """One run, from an open port to a closed one."""

    def __init__(
        self,
        load: Load,
        config: EngineConfig,
        serving: Serving,
        keys: KeyRing,
        listener: socket.socket,
        *,
        admin_listener: socket.socket | None = None,
        on_ready: OnReady,
        say: Callable[[str], None],
    ) -> None:
        """Wire the parts.

        Args:
            load: loads the model; called in a thread.
            config: of the engine, as it was asked for.
            serving: what is served.
            keys: of clients.
            listener: bound.
            admin_listener: bound, for the admin routes; None: there are none.
            on_ready: told when requests are taken.
            say: gets lines of the log that people need.
        """
        settings = serving.config
        self._load_engine, self._settings, self.serving = load, settings, serving
        self._listener, self._on_ready, self._say = listener, on_ready, say
        self._config, self._reporter = config, Reporter(settings, serving.names[0])
        metrics = self._reporter.metrics
        serving.on_refusal = self._reporter.note_refusal
        serving.on_ignored = metrics.count_ignored
        serving.num_generated = lambda: metrics.totals.num_generation_tokens
        self._app = create_app(serving, metrics.route())
        self._guard = Guard(
            self._app,
            keys=keys,
            local_only=settings.is_loopback and not settings.uds,
            origins=settings.allowed_origins,
            open_paths=OPEN_PATHS if settings.metrics_key else OPEN_PATHS | {METRICS_PATH},
            quiet_paths=frozenset(settings.disable_access_log_for_endpoints),
            max_requests=settings.max_connections,
            observe=metrics.observe_http,
            on_refusal=self._reporter.note_refusal,
        )
        http = http_server(
            self._guard,
            keyfile=settings.ssl_keyfile,
            certfile=settings.ssl_certfile,
            stall_seconds=settings.stream_stall_timeout,
            max_connections=settings.max_connections + SPARE_CONNECTIONS,
        )
        self._servers = [(http, listener)]
        if admin_listener is not None:
            self._servers.append((self._admin_http(), admin_listener))
        self._stopped = asyncio.Event()
        self._num_signals = 0
        self._is_loading = True

    def drain(self) -> None:
        """Finish what is open, and end; in the event loop. A second call does nothing."""
        self._stopped.set()

    def stop(self) -> None:
        """The same for a signal: a second one does not wait for open requests."""
        self._num_signals += 1
        self._stopped.set()

    @property
    def is_stuck(self) -> bool:
        """Told twice to stop, and still in the middle of loading, for the first time or anew."""
        return self._num_signals > 1 and (self._is_loading or self.serving.is_recovering)

    def _admin_http(self) -> HttpServer:
        """The admin routes. Whoever may open the unix socket needs no key."""
        settings = self._settings
        keys = read_keys((), "" if settings.admin_uds else settings.admin_api_key_file)
        guard = Guard(
            create_admin_app(self.serving, self.drain),
            keys=KeyRing(keys),
            local_only=not settings.admin_uds,
            origins=(),
            open_paths=frozenset(),
        )
        return http_server(guard, keyfile="", certfile="")

    async def run(self) -> int:
        """Serve until `stop` or a failure; returns the exit code.

        Raises:
            HeddleError: the engine did not start.
        """
        http = asyncio.gather(*(server.serve(sockets=[at]) for server, at in self._servers))
        url = url_of(self._settings, self._listener)
        self._say(f"listening at {url}; loading {self._config.model}")
        loading = asyncio.ensure_future(self._load())
        stopped: asyncio.Future[Any] = asyncio.ensure_future(self._stopped.wait())
        try:
            first: set[asyncio.Future[Any]] = {http, loading, stopped}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                await self._serve_until_stopped(loading.result(), http, stopped)
        finally:
            if not loading.done():
                self._say("stopping while the model loads")
            await asyncio.wait({loading})
            await self._reporter.end()
            for server, _ in self._servers:
                server.should_exit = True
                server.force_exit = self._num_signals > 1
            if loading.exception() is None:
                await loading.result().close()
            self.serving.templates.close()
            await asyncio.wait({http})
            stopped.cancel()
        http.result()  # a listener that broke is no good end
        if self.serving.phase is Phase.FAILED:
            self._say(f"error: {self.serving.reason}")
            return 1
        return 0

    async def _load(self) -> AsyncLLM:
        reporter, metrics = self._reporter, self._reporter.metrics
        try:
            note_plan = partial(reporter.note_plan, self._config)
            llm = await asyncio.to_thread(self._load_engine, metrics.watch_executor, note_plan)
        finally:
            self._is_loading = False
        reporter.note_phase("load")
        engine = AsyncLLM(llm, on_step=metrics.on_step)
        try:
            if self._stopped.is_set():
                raise HeddleError("stopped while the model was loading")
            await warm_up(engine)
            reporter.note_phase("warm-up")
            url = url_of(self._settings, self._listener)
            routes = [
                route.path
                for route in self._app.routes
                if isinstance(route, Route) and route.path.removeprefix("/v1/") not in NOT_BUILT
            ]
            await reporter.begin(engine, routes=routes, url=url)
            self._app.state.deep_health = DeepHealth(engine, metrics.canaries)
        except BaseException:
            await engine.close()
            raise
        self.serving.begin(engine)
        return engine

    async def _serve_until_stopped(
        self, engine: AsyncLLM, http: asyncio.Future[Any], stopped: asyncio.Future[Any]
    ) -> None:
        self._on_ready(self.serving, url_of(self._settings, self._listener))
        watch = asyncio.ensure_future(self._watch(engine))
        first: set[asyncio.Future[Any]] = {http, watch, stopped}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        watch.cancel()
        if stopped.done():
            await self._drain()

    async def _watch(self, engine: AsyncLLM) -> None:
        """Return when the engine has failed."""
        while engine.failure is None:
            await asyncio.sleep(0.1)
        self._reporter.metrics.note_failure()
        self.serving.fail(f"the engine has failed: {engine.failure}")

    async def _drain(self) -> None:
        """Let open requests finish, within the limit and until a second signal."""
        self.serving.drain("the server is stopping")
        self._say(f"stopping: {counted(self.serving.num_open, 'open request')}")
        end = time.monotonic() + self._settings.shutdown_timeout
        while self._is_busy() and time.monotonic() < end and self._num_signals < 2:
            await asyncio.sleep(0.02)

    def _is_busy(self) -> bool:
        """An answer is not made, or not sent."""
        return bool(self.serving.num_open or self._guard.num_requests)


async def _until_signals(server: Server) -> int:
    loop = asyncio.get_running_loop()

    def hear() -> None:
        server.stop()
        if server.is_stuck:  # a thread loads and cannot be stopped; ranks end with this process
            os._exit(INTERRUPTED)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, hear)
    return await server.run()
