"""Work that strangers may describe is done in helper processes: what runs away there hurts nobody.

    driver                                  helper
    what it works with, once ----------->   made ready; from here on its limits hold
    task ------------------------------->   answer
         <------------- answer, or the end of the helper

A library that is asked for too much cannot be broken off, so its process is: by the kernel, when
the time of a task is over or its memory is spent. A helper inherits no secret, writes no file, and
ends when its driver has gone.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import threading
import weakref
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from heddle.engine.interpreter import interpreter_command

GRACE_SECONDS = 5.0
"""Beyond its time a helper is killed from here: it was stopped, or the kernel is late."""
START_SECONDS = 60.0
_SECRET_PREFIXES = ("HEDDLE_", "HF_")
"""Of variables that may hold a key; no helper needs one of them."""

TaskHandler = Callable[[bytes], bytes]
"""From a task to what the driver is told of it."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Of one task."""

    seconds: float = 5.0
    memory_bytes: int = 512 << 20
    """Beside what the helper holds already, and beside what it reserves."""


class RanAway(Exception):
    """A task took more than its limits; its helper has ended."""


class NoHelper(Exception):
    """No helper can be had now."""


class HelperPool:
    """Helpers of one kind, each started when it is needed. Any thread may ask."""

    def __init__(
        self, module: str, setup: Callable[[], bytes], limits: Limits, *, seats: int
    ) -> None:
        """Start none yet.

        Args:
            module: whose `serve(descriptor)` runs in a helper; it calls `serve_tasks`.
            setup: what a helper works with; called once per helper.
            limits: of one task.
            seats: helpers at work at once; further callers wait.
        """
        self._module = module
        self._setup = setup
        self._limits = limits
        self._seats = threading.BoundedSemaphore(seats)
        self._idle: list[Helper] = []
        self._is_closed = False
        self._finalizer = weakref.finalize(self, _end, self._idle, os.getpid())

    @property
    def limits(self) -> Limits:
        """Of one task."""
        return self._limits

    def ask(self, task: bytes) -> bytes:
        """The answer of a helper.

        Raises:
            RanAway: the task took too much time or memory.
            NoHelper: no process can be had.
        """
        with self._seats:
            helper = self._take_idle() or Helper(self._module, self._setup(), self._limits)
            try:
                answer = helper.ask(task)
            except BaseException:
                helper.end()
                raise
            self._idle.append(helper)
            if self._is_closed:
                self.close()
        return answer

    def close(self) -> None:
        """End the idle helpers; those at work end with their tasks. May be called twice."""
        self._is_closed = True
        _end(self._idle, os.getpid())

    def _take_idle(self) -> Helper | None:
        """One that waits for a task; None: there is none.

        The kernel may have ended a helper since its last task, to make room. The next task is not
        to blame for that.
        """
        with contextlib.suppress(IndexError):
            while True:
                helper = self._idle.pop()
                if helper.is_alive:
                    return helper
                helper.end()
        return None


class Helper:
    """The driver's end of one."""

    def __init__(self, module: str, setup: bytes, limits: Limits) -> None:
        """Start it, and wait until it is ready.

        Raises:
            NoHelper: it does not start.
        """
        self._limits = limits
        self._connection, theirs = Pipe()
        try:
            with theirs:
                self._process = subprocess.Popen(  # noqa: S603 - the interpreter, with our own line
                    interpreter_command(module, "serve", theirs.fileno()),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # a library's last words, before it breaks off
                    env=_environment(),
                )
        except OSError as error:
            self._connection.close()
            raise NoHelper(f"no room for a helper process ({error.strerror or error})") from None
        try:
            self._connection.send_bytes(msgspec.msgpack.encode((limits, setup)))
            if not self._connection.poll(START_SECONDS):
                raise TimeoutError
            self._connection.recv_bytes()
        except (OSError, EOFError):
            self.end()
            raise NoHelper("the helper process did not start") from None
        except BaseException:
            self.end()
            raise

    @property
    def is_alive(self) -> bool:
        """It has not ended."""
        return self._process.poll() is None

    def ask(self, task: bytes) -> bytes:
        """The answer to one task.

        Raises:
            RanAway: it took too much, and the helper has ended.
        """
        too_long = f"it takes more than {self._limits.seconds:g} s"
        try:
            self._connection.send_bytes(task)
            if not self._connection.poll(self._limits.seconds + GRACE_SECONDS):
                raise RanAway(too_long)
            return self._connection.recv_bytes()
        except (OSError, EOFError):
            if self._process.wait() == -signal.SIGALRM:
                raise RanAway(too_long) from None
            most = self._limits.memory_bytes >> 20
            raise RanAway(f"it takes more than {most} MiB, or breaks the library") from None

    def end(self) -> None:
        """End it, whatever it does."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def forget(self) -> None:
        """Of a fork of the driver: it holds a copy of the handle, not the process."""
        self._connection.close()
        self._process.returncode = 0


def _end(idle: list[Helper], owner: int) -> None:
    while idle:
        helper = idle.pop()
        helper.end() if os.getpid() == owner else helper.forget()


def _environment() -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if not name.startswith(_SECRET_PREFIXES)
    }


def serve_tasks(
    descriptor: int, prepare: Callable[[bytes], TaskHandler], *, reserved_bytes: int = 0
) -> None:
    """The helper: answer what comes until the driver has gone.

    Args:
        descriptor: of the connection to the driver.
        prepare: takes what the pool's `setup` has given, and returns what answers tasks.
        reserved_bytes: that a task maps and hardly touches, such as a large stack.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver
    with Connection(descriptor) as driver, contextlib.suppress(EOFError, OSError):
        limits, setup = msgspec.msgpack.decode(driver.recv_bytes(), type=tuple[Limits, bytes])
        answer = prepare(setup)
        most = _data_bytes() + reserved_bytes + limits.memory_bytes
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        driver.send_bytes(b"")
        while True:
            task = driver.recv_bytes()
            # Nobody catches this signal, so the kernel ends the process in the library's midst.
            signal.setitimer(signal.ITIMER_REAL, limits.seconds)
            told = answer(task)
            signal.setitimer(signal.ITIMER_REAL, 0)
            driver.send_bytes(told)


def _data_bytes() -> int:
    """Writable memory of this process, as the kernel counts it."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no VmData")
