"""The main function of a rank process.

Order of business: arm the death pipe, so that no moment exists in which this process could outlive
its driver; then make signals, output and stack dumps the driver's; then serve.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from heddle.engine.executors.base import load_worker_factory
from heddle.engine.executors.death import DeathWatch, die_with_parent
from heddle.engine.executors.failure import failure_of
from heddle.engine.executors.frames import BlockingChannel
from heddle.engine.executors.messages import (
    Failed,
    Progress,
    Ready,
    Reply,
    Start,
    Step,
    Stop,
    ToRank,
)
from heddle.engine.executors.rank_world import create_rank_world
from heddle.engine.executors.spoiled import OVERSIZED, spoiled
from heddle.faults.page import start_heartbeat
from heddle.faults.watch import RankWatch, create_watch
from heddle.step.identity import check_identity, identity_of

if TYPE_CHECKING:  # torch is imported once the process is set up
    from heddle.comm.base import World

STACKS_SIGNAL = signal.SIGUSR1
"""Makes a rank write the stacks of its threads to its stacks file, even within a C call."""


def run(
    channel: int, death: int, output: int, stacks: int, page: int, segment: int | None = None
) -> NoReturn:
    """Be a rank until told to stop; never returns.

    Args:
        channel: stream socket to the driver; its first message is `Start`.
        death: read end of a pipe that nobody writes to; its end of file is the driver's death.
        output: takes the place of stdout and stderr.
        stacks: file for stack dumps.
        page: on which this rank says where it stands.
        segment: memory shared with the other ranks; None: they talk over gloo.
    """
    death_watch = DeathWatch(death)
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt goes to the driver, which decides
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    faulthandler.enable(2)
    faulthandler.register(STACKS_SIGNAL, stacks, all_threads=True)
    messages: BlockingChannel[ToRank] = BlockingChannel(socket.socket(fileno=channel), ToRank)
    try:
        _serve(messages, death_watch, page, segment)
    except EOFError:
        os._exit(1)  # the driver is gone and needs no answer
    except BaseException as error:
        with suppress(OSError):
            messages.send(Failed.of(failure_of(-1, error)))
        os._exit(1)
    # Without the interpreter's tear-down: torch's threads and groups make it slow, and nothing of
    # this process is worth saving.
    os._exit(0)


def _serve(
    messages: BlockingChannel[ToRank], death: DeathWatch, page: int, segment: int | None
) -> None:
    start = messages.receive()
    if not isinstance(start, Start):
        return  # stopped before it began
    death.clean_up = start.store_directory
    _set_up_process(start)
    resolved = start.resolved
    check_identity(identity_of(resolved), start.identity)
    watch = create_watch(resolved.faults, start.global_rank, resolved.epoch, page)
    start_heartbeat(watch.page)
    watch.enter("import")
    import torch

    torch.set_num_threads(resolved.num_threads)
    watch.enter("group")
    with create_rank_world(start, segment) as world:
        _run_steps(messages, start, world, watch)


def _run_steps(
    messages: BlockingChannel[ToRank], start: Start, world: World, watch: RankWatch
) -> None:
    """Load, then answer steps until told to stop."""

    def report(done: int, total: int) -> None:
        messages.send(Progress(done, total))

    create_worker = load_worker_factory(start.worker)
    worker = create_worker(start.resolved, start.global_rank, world, report, watch=watch)
    messages.send(Ready())
    receive = spoiled(messages.receive, watch.injector)
    watch.enter("idle")
    while isinstance(message := receive(), Step):
        deadline = time.monotonic() + message.seconds
        reply = Reply(worker.execute(message.batch, message.digest, deadline))
        watch.enter("reply")
        if watch.has_bad_frame:
            messages.send_raw(OVERSIZED)
        messages.send(reply)
        watch.enter("idle")
    assert isinstance(message, Stop)


def _set_up_process(start: Start) -> None:
    """Name the process, and let its log lines begin with their level: the driver adds the rest."""
    with suppress(OSError), open("/proc/self/comm", "w") as name:
        name.write(f"heddle-rank{start.global_rank}")
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING, force=True)
    logging.getLogger("heddle").setLevel(logging.INFO)
