"""The driver's handle on a launcher process, and on the rank processes that it starts.

The launcher (`forkserver`) has imported torch and the rank's code, and forks a rank in a few
milliseconds. It is a process of our own, started with the interpreter and a line of code: the
user's main module is never imported again, so a script needs no `__main__` guard, and a notebook or
a script on stdin works. Nothing listens anywhere: one socket pair leads to it, and every rank gets
its descriptors through that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import time
import weakref
from collections.abc import Sequence
from multiprocessing.connection import wait  # poll(2), without the 1024 limit of select
from typing import Literal, NamedTuple

from heddle.engine.interpreter import interpreter_command
from heddle.errors import RankFailed

_WORLD_MODULES = {"shm": "heddle.comm.shared_memory.world", "gloo": "heddle.comm.torch_group"}
"""What connects the ranks, by the name of `cpu_comm_backend`."""
_KERNEL_MODULES = {
    "torch": (),
    "numba": ("heddle.attention.backends.numba_cpu", "heddle.kernels.linear.numba_cpu"),
}
"""What makes kernels, by their kind: importing numba takes seconds, and starts no thread."""
STATUS = struct.Struct("<q")
"""What the launcher writes to a status pipe: the rank's pid, and at its end its exit code."""
_EXIT_SECONDS = 5.0


def modules_to_warm(cpu_comm_backend: str, kernels: str = "torch") -> tuple[str, ...]:
    """What every rank will import; the launcher does it once."""
    world = _WORLD_MODULES[cpu_comm_backend]
    return ("torch", world, "heddle.runner.worker", *_KERNEL_MODULES[kernels])


class RankDescriptors(NamedTuple):
    """Descriptors that one rank process is born with, in the order of `rank_process.run`."""

    channel: int
    death: int
    output: int
    stacks: int
    page: int
    """On which the rank says where it stands."""
    segment: int | None = None
    """Memory that the ranks share, or none."""


class RankHandle:
    """One rank process, seen from the driver."""

    def __init__(self, status: int) -> None:
        self.status = status
        """Pipe that becomes readable when the rank has ended and was reaped."""
        self.pid = 0
        self.exit_code: int | None = None
        """Negative for a signal; None while it runs, or if the launcher died before it."""
        self.why = ""
        """What else is known of its end."""
        self.is_gone = False

    def read_pid(self, deadline: float) -> None:
        """Wait until the launcher has started the process.

        Raises:
            RankFailed: it has not by `deadline`, or the launcher ended.
        """
        ready = wait([self.status], max(0.0, deadline - time.monotonic()))
        word = os.read(self.status, STATUS.size) if ready else None
        if not word:
            raise RankFailed(
                "the launcher of rank processes "
                + ("ended; its own words are on stderr" if ready else "did not answer in time")
            )
        (self.pid,) = STATUS.unpack(word)

    def read_exit(self) -> None:
        """Take note of the end; to be called once `status` is readable."""
        word = os.read(self.status, STATUS.size)
        if word:
            (self.exit_code,) = STATUS.unpack(word)
        self.is_gone = True

    def signal(self, number: int) -> None:
        """Send a signal unless the process has ended.

        Its pid stays its own until the launcher has reaped it, and then `status` is readable.
        """
        if self.pid and not self.is_gone and not wait([self.status], 0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def close(self) -> None:
        """Give the status pipe back."""
        os.close(self.status)


class RankLauncher:
    """A warm process that starts ranks; may serve several executors, also at once."""

    def __init__(
        self,
        method: Literal["fork", "spawn"] = "fork",
        warm_modules: Sequence[str] = modules_to_warm("shm"),
    ) -> None:
        """Start it; returns before it is warm.

        Args:
            method: `fork` is quick; `spawn` gives each rank a fresh interpreter, which a rank needs
                that uses a device.
            warm_modules: what a forking launcher imports first.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = (theirs.fileno(), method, list(warm_modules) if method == "fork" else [])
            self._process = subprocess.Popen(  # noqa: S603 - the interpreter, with our own line
                interpreter_command("heddle.engine.executors.forkserver", "serve", *arguments),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # stdout belongs to the program's own answer
                # The launcher must stay free of threads; numpy would start some when imported.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )
        self._control = ours
        self.is_silent = False
        """It did not start or reap a rank in time: it is stopped, or hangs."""
        self._finalizer = weakref.finalize(self, _end_launcher, self._process, ours, os.getpid())

    @property
    def pid(self) -> int:
        """Process id of the launcher."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """The process has not ended."""
        return self._process.poll() is None

    def launch(self, descriptors: RankDescriptors) -> RankHandle:
        """Ask for one rank; `RankHandle.read_pid` says when it is there.

        The descriptors are duplicated on the way; the caller closes its own.

        Raises:
            RankFailed: the launcher has ended.
        """
        status_read, status_write = os.pipe()
        try:
            passed = [number for number in descriptors if number is not None]
            socket.send_fds(self._control, [b"r"], [*passed, status_write])
        except OSError as error:
            os.close(status_read)
            raise RankFailed(
                f"the launcher of rank processes (pid {self.pid}) has ended; start a new executor"
            ) from error
        finally:
            os.close(status_write)
        return RankHandle(status_read)

    def close(self) -> None:
        """End the launcher, and with it every rank that it started; a second call does nothing."""
        self._finalizer()


def _end_launcher(process: subprocess.Popen[bytes], control: socket.socket, owner: int) -> None:
    control.close()  # the launcher ends its ranks and itself when this end is gone
    if os.getpid() != owner:  # a fork of the driver holds a copy of the handle, not the process
        process.returncode = 0
        return
    try:
        process.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
