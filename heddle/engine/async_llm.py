"""The engine in a thread of its own, for callers that live in an event loop.

    event loop                                   engine thread
    prepare (any thread) --> submit(prepared) --> admit
                              Stream  <---------- step, step, step: news of all streams at once
                              abort   ----------> abort: blocks return with the end of the step

One crossing per step carries the news of all streams. A stream merges what nobody has read yet, so
a slow reader costs no memory per token and never holds up the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Self

from heddle.config.sampling import RequestOutputKind, SamplingParams
from heddle.engine.inputs import parse_prompt
from heddle.engine.llm import LLM
from heddle.engine.outputs import RequestOutput, merged
from heddle.engine.prepared import PreparedRequest
from heddle.errors import HeddleError, RankFailed, RequestError
from heddle.scheduler.progress import Progress

_Command = Callable[[], None]
LOOK_SECONDS = 0.04
"""Between two looks at ranks that have nothing to do."""


class Stream:
    """What one request gives, piece by piece. Lives in the event loop.

    Iterating gives outputs until the last one (`finished`); a request that fails ends with an
    output whose `error` is set, an engine that fails raises.
    """

    def __init__(self, prepared: PreparedRequest) -> None:
        self.prepared = prepared
        self.progress: Progress | None = None
        """How far its prompt is; None until a step has told."""
        self.on_start: Callable[[], None] | None = None
        """Called once, in the event loop, when the request has left the queue to run."""
        self._unread: RequestOutput | None = None
        self._failure: BaseException | None = None
        self._is_ended = False
        self._news = asyncio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        """Everything new since the last call, waiting for it if there is nothing.

        Raises:
            HeddleError: the request was not admitted, or the engine failed.
        """
        if self._is_ended:
            raise StopAsyncIteration
        await self._news.wait()
        self._news.clear()
        if self._unread is None:
            self._is_ended = True
            assert self._failure is not None
            raise self._failure
        output, self._unread = self._unread, None
        self._is_ended = output.finished
        if self._failure is not None:
            self._news.set()
        return output

    def tell(self, output: RequestOutput) -> None:
        """Add news; called in the event loop."""
        is_delta = self.prepared.params.output_kind is RequestOutputKind.DELTA
        if self._unread is not None and is_delta:  # of other kinds the later output says it all
            output = merged(self._unread, output)
        self._unread = output
        self._news.set()

    def note_start(self) -> None:
        """It has left the queue; called once, in the event loop."""
        if self.on_start is not None:
            self.on_start()

    def fail(self, failure: BaseException) -> None:
        """Nothing more will come; called in the event loop."""
        self._failure = failure
        self._news.set()


class AsyncLLM:
    """A loaded model that serves many callers of one event loop at once."""

    def __init__(self, llm: LLM, *, on_step: Callable[[LLM], None] | None = None) -> None:
        """Take over an engine that nobody else steps, and start its thread.

        Args:
            llm: loaded; `close` closes it.
            on_step: called in the engine thread after each step, to read counters.
        """
        self.llm = llm
        self.driver = llm.driver
        self.prepare = llm.driver.prepare
        """Checks a request; any thread may call it, also while a step runs."""
        self._loop = asyncio.get_running_loop()
        self._on_step = on_step
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        """By request id; belongs to the engine thread."""
        self._ids: dict[Stream, str] = {}
        """The same, the other way round."""
        self._queued: set[Stream] = set()
        """Those that have not left the queue, as far as was told."""
        self._failure: BaseException | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="heddle-engine", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> BaseException | None:
        """Why the engine has failed; None while it works."""
        return self._failure

    def submit(self, prepared: PreparedRequest) -> Stream:
        """Queue a checked request.

        Raises:
            RankFailed: the engine has failed.
            HeddleError: it is closed.
        """
        self._check_open()
        stream = Stream(prepared)
        self._commands.put(lambda: self._admit(stream))
        return stream

    def abort(self, stream: Stream) -> None:
        """End a request whose reader has gone; harmless for one that has ended."""
        if not self._is_closed:
            self._commands.put(lambda: self._abort(stream))

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Complete one prompt; leaving the iteration aborts the request.

        Args:
            prompt: as of `LLM.generate`.
            sampling_params: its `output_kind` says what each output carries.
            lora_request: name of an adapter; None: none.
        Yields:
            Outputs; the last one is `finished`.
        Raises:
            RequestError: it is refused or fails.
            RankFailed: the engine has failed.
        """
        params = sampling_params or SamplingParams()
        prepare = partial(self.prepare, parse_prompt(prompt), params, adapter=lora_request)
        stream = self.submit(await asyncio.to_thread(prepare))
        try:
            async for output in stream:
                if output.error is not None:
                    raise output.error
                yield output
        finally:
            self.abort(stream)

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run a function between two steps, in the thread that owns the driver.

        Raises:
            RankFailed: the engine has failed.
            Exception: whatever the function raises.
        """
        self._check_open()
        future: asyncio.Future[Any] = self._loop.create_future()

        def run() -> None:
            try:
                result = function()
            except BaseException as error:
                self._post(_settle, future, None, error)
                if isinstance(error, RankFailed):  # it is not the function's alone
                    raise
            else:
                self._post(_settle, future, result, None)

        self._commands.put(run)
        return await future

    async def close(self) -> None:
        """Abort what is open and end the ranks, those that are being started anew as well; a second
        call waits for the first.
        """
        if not self._is_closed:
            self._is_closed = True
            self.driver.stop_restarts()
            self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    # The engine thread.

    def _run(self) -> None:
        try:
            while self._obey():
                if self._has_work:
                    self._step()
        except BaseException as failure:
            self._failure = failure
            self._fail_all(failure)
            # What was asked for meanwhile is told the same.
            while (command := self._commands.get()) is not None:
                with contextlib.suppress(HeddleError):
                    command()
        finally:
            self._fail_all(HeddleError("the engine was closed"))
            self.llm.close()

    def _obey(self) -> bool:
        """Carry out what was asked for; without open requests, wait for something. False: close."""
        while True:
            has_work = self._has_work
            try:
                command = self._commands.get(block=not has_work, timeout=LOOK_SECONDS)
            except queue.Empty:
                if has_work:
                    return True
                self.driver.check_ranks()
                continue
            if command is None:
                return False
            command()

    @property
    def _has_work(self) -> bool:
        """A request is open, or a step of one that has gone is to be ended."""
        return self.driver.has_work or self.driver.is_busy

    def _step(self) -> None:
        outputs = self.driver.step()
        news = [(self._streams[output.request_id], output) for output in outputs]
        found = self.driver.progress()
        progress = [(self._streams[name], how_far) for name, how_far in found.items()]
        started = [
            stream
            for stream in self._queued
            if (how_far := found.get(self._ids.get(stream, ""))) is None or how_far.is_running
        ]
        self._queued.difference_update(started)
        for stream, output in news:
            if output.finished:
                self._forget(stream)
        self._post(_deliver, news, progress, started)
        if self._on_step is not None:
            self._on_step(self.llm)

    def _admit(self, stream: Stream) -> None:
        try:
            self._check_alive()
            request_id = self.driver.admit(stream.prepared)
        except RequestError as refusal:
            self._post(stream.fail, refusal)
            return
        except BaseException as failure:  # it is no open stream yet: nobody else would tell it
            self._post(stream.fail, failure)
            raise
        self._streams[request_id] = stream
        self._ids[stream] = request_id
        self._queued.add(stream)

    def _abort(self, stream: Stream) -> None:
        request_id = self._ids.get(stream)
        if request_id is not None:
            self._forget(stream)
            output = self.driver.abort(request_id)
            if output is not None:
                self._post(stream.tell, output)

    def _forget(self, stream: Stream) -> None:
        del self._streams[self._ids.pop(stream)]
        self._queued.discard(stream)

    def _fail_all(self, failure: BaseException) -> None:
        for stream in self._streams.values():
            self._post(stream.fail, failure)
        self._streams.clear()
        self._ids.clear()
        self._queued.clear()

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(function, *arguments)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise RankFailed(f"the engine has failed: {self._failure}") from self._failure

    def _check_open(self) -> None:
        self._check_alive()
        if self._is_closed:
            raise HeddleError("the engine is closed")


def _deliver(
    news: list[tuple[Stream, RequestOutput]],
    progress: list[tuple[Stream, Progress]],
    started: list[Stream],
) -> None:
    for stream in started:
        stream.note_start()
    for stream, found in progress:
        stream.progress = found
    for stream, output in news:
        stream.tell(output)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():  # the caller has gone
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
