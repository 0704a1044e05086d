"""A launched process's seat among the ranks: its world, its worker, and the talk between ranks.

The talk runs over the control group of the world: the driver broadcasts, all gather. Waiting for
the next message may take days; everything within a step has a limit. The worker has a thread of its
own and works off a queue of steps, so that talk goes on meanwhile.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

from heddle.comm.torch_group import create_torch_world
from heddle.config.engine import ResolvedConfig
from heddle.engine.executors.base import load_worker_factory
from heddle.engine.executors.frames import FrameDecoder, encode_frame
from heddle.engine.executors.interface import choose_interface
from heddle.engine.executors.launch_info import LaunchInfo
from heddle.engine.executors.messages import (
    Agreement,
    Collect,
    Ready,
    Reply,
    Round,
    Step,
    Stop,
    ToSeat,
)
from heddle.errors import CollectiveTimeout, HeddleError, RankFailed
from heddle.step.identity import check_identity, identity_of

_T = TypeVar("_T")
_Answer = TypeVar("_Answer", Ready, Reply)
_LEAVE_SECONDS = 1.0
"""Longest wait for a worker in the middle of a step."""


class Seat:
    """One rank of a launched world, the driver's included."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        launch: LaunchInfo,
        worker: str,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Meet the other ranks, and make this one's worker; blocks until all have come."""
        torch.set_num_threads(resolved.num_threads)
        self.is_idle = False
        """True between steps, when the other ranks listen for the driver."""
        self._rank = launch.rank
        self._world = create_torch_world(
            rank=launch.rank,
            world_size=launch.world_size,
            store_path=None,
            timeout_seconds=resolved.group_timeout_seconds,
            longest_wait_seconds=resolved.step_timeout_seconds,
            interface=choose_interface(launch),
        )
        agreed = self._adopt(resolved)
        self._worker = load_worker_factory(worker)(agreed, launch.rank, self._world, on_progress)
        self._is_usable = True
        self._steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[Reply | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._work, args=(resolved.num_threads,), name="heddle-worker", daemon=True
        )
        self._thread.start()

    def _adopt(self, resolved: ResolvedConfig) -> ResolvedConfig:
        """The driver's configuration, with what is this host's own; refused where this rank was
        started with other settings or versions.

        Each process measured its own free memory; a pool of another size would not hold the blocks
        that the driver hands out.
        """
        own = identity_of(resolved)
        frame = encode_frame(Agreement(resolved, own)) if self._rank == 0 else None
        agreement: Agreement = _decode(self._world.broadcast_bytes(frame), Agreement)
        check_identity(own, agreement.identity)
        return dataclasses.replace(
            agreement.resolved, model_path=resolved.model_path, num_threads=resolved.num_threads
        )

    def receive(self) -> ToSeat:
        """The driver's next message, however long it takes."""
        return _decode(self._world.broadcast_bytes(None), ToSeat)

    def send(self, message: Round | Collect, seconds: float) -> None:
        """Tell all other ranks; the driver's part."""
        frame = encode_frame(message)
        what = f"the {type(message).__name__}"
        self._within(seconds, lambda: self._world.broadcast_bytes(frame), what)

    def begin(self, step: Step) -> None:
        """Queue this rank's part of a step; returns at once."""
        self._steps.put(step)

    def reply(self, seconds: float) -> Reply:
        """This rank's answer to its oldest step.

        Raises:
            CollectiveTimeout: it did not come in time.
            BaseException: whatever the worker raised; later steps are not run.
        """
        try:
            result = self._replies.get(timeout=max(0.0, seconds))
        except queue.Empty:
            raise CollectiveTimeout(f"the step did not end within {seconds:.1f} s") from None
        if isinstance(result, BaseException):
            raise result
        return result

    def gather(self, message: _Answer | None, kind: type[_Answer], seconds: float) -> list[_Answer]:
        """The messages of all ranks that have one, in order of rank.

        Args:
            message: this rank's; None: it has none.
            kind: of message.
            seconds: limit.
        Raises:
            CollectiveTimeout: some rank is late.
            RankFailed: some rank is gone.
            HeddleError: some rank sent something else.
        """
        frame = b"" if message is None else encode_frame(message)
        what = f"the {kind.__name__} of all ranks"
        frames = self._within(seconds, lambda: self._world.all_gather_bytes(frame), what)
        return [_decode(answer, kind) for answer in frames if answer]

    def leave(self) -> None:
        """Leave the world; rank 0 tells the others to leave too, if they listen."""
        self._steps.put(None)
        if not self._is_usable:
            return
        self._is_usable = False
        self._thread.join(_LEAVE_SECONDS)
        if self._thread.is_alive():
            return  # it holds the groups; the end of the process frees them
        if self.is_idle and self._rank == 0:
            # Called here, not in a thread: at the interpreter's exit no thread may start. A few
            # bytes do not wait for their readers.
            with suppress(RankFailed):  # a rank that is gone needs no word
                self._world.broadcast_bytes(encode_frame(Stop()))
        self._world.destroy()

    def _work(self, num_threads: int) -> None:
        """Body of the worker's thread: until None or a failure."""
        torch.set_num_threads(num_threads)
        while (step := self._steps.get()) is not None:
            try:
                deadline = time.monotonic() + step.seconds
                self._replies.put(Reply(self._worker.execute(step.batch, step.digest, deadline)))
            except BaseException as error:
                self._replies.put(error)
                return

    def _within(self, seconds: float, call: Callable[[], _T], what: str) -> _T:
        """Result of a call on the control group, which knows no deadline itself."""
        box: queue.SimpleQueue[_T | BaseException] = queue.SimpleQueue()

        def run() -> None:
            try:
                box.put(call())
            except BaseException as error:
                box.put(error)

        threading.Thread(target=run, name="heddle-control-call", daemon=True).start()
        try:
            result = box.get(timeout=max(0.0, seconds))
        except queue.Empty:
            self._is_usable = False  # the call still holds the group
            raise CollectiveTimeout(f"{what} did not arrive within {seconds:.1f} s") from None
        if isinstance(result, BaseException):
            raise result
        return result


def _decode(frame: bytes, kind: type[_T] | object) -> _T:
    """The one message that a frame holds."""
    decoder: FrameDecoder[_T] = FrameDecoder(kind)
    for message in decoder.feed(frame):
        return message
    raise HeddleError(f"received {len(frame)} bytes that are no whole message")
