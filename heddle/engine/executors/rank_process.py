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
import sys
import time
from contextlib import suppress
from typing import NoReturn

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

STACKS_SIGNAL = signal.SIGUSR1
"""Makes a rank write the stacks of its threads to its stacks file, even within a C call."""


def run(channel: int, death: int, output: int, stacks: int) -> NoReturn:
    """Be a rank until told to stop; never returns.

    Args:
        channel: stream socket to the driver; its first message is `Start`.
        death: read end of a pipe that nobody writes to; its end of file is the driver's death.
        output: takes the place of stdout and stderr.
        stacks: file for stack dumps.
    """
    watch = DeathWatch(death)
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt goes to the driver, which decides
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    faulthandler.enable(2)
    faulthandler.register(STACKS_SIGNAL, stacks, all_threads=True)
    messages: BlockingChannel[ToRank] = BlockingChannel(socket.socket(fileno=channel), ToRank)
    try:
        _serve(messages, watch)
    except EOFError:
        os._exit(1)  # the driver is gone and needs no answer
    except BaseException as error:
        with suppress(OSError):
            messages.send(Failed.of(failure_of(-1, error)))
        os._exit(1)
    # Without the interpreter's tear-down: torch's threads and groups make it slow, and nothing of
    # this process is worth saving.
    os._exit(0)


def _serve(messages: BlockingChannel[ToRank], watch: DeathWatch) -> None:
    start = messages.receive()
    if not isinstance(start, Start):
        return  # stopped before it began
    watch.clean_up = start.store_directory
    _set_up_process(start)
    import torch

    from heddle.comm.torch_group import create_torch_world

    resolved = start.resolved
    torch.set_num_threads(resolved.num_threads)
    world = create_torch_world(
        rank=start.global_rank,
        world_size=resolved.parallel.world_size,
        store_path=os.path.join(start.store_directory, "store"),
        timeout_seconds=resolved.group_timeout_seconds,
        longest_wait_seconds=resolved.step_timeout_seconds,
        interface="lo" if sys.platform == "linux" else "lo0",
    )

    def report(done: int, total: int) -> None:
        messages.send(Progress(done, total))

    worker = load_worker_factory(start.worker)(resolved, start.global_rank, world, report)
    messages.send(Ready())
    while isinstance(message := messages.receive(), Step):
        deadline = time.monotonic() + message.seconds
        messages.send(Reply(worker.execute(message.batch, message.digest, deadline)))
    assert isinstance(message, Stop)
    world.destroy()


def _set_up_process(start: Start) -> None:
    """Name the process, and let its log lines begin with their level: the driver adds the rest."""
    with suppress(OSError), open("/proc/self/comm", "w") as name:
        name.write(f"heddle-rank{start.global_rank}")
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING, force=True)
    logging.getLogger("heddle").setLevel(logging.INFO)
