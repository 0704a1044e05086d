"""The launcher process: warm, single-threaded, and the parent of all rank processes.

It lives as long as the driver's end of its control socket. Then it kills the ranks that are left
and ends: the second means, beside each rank's own death pipe, against ranks without a driver, and
the one that works while a rank holds the interpreter lock in a C call.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import NoReturn

from heddle.engine.executors import rank_process
from heddle.engine.executors.launcher import STATUS
from heddle.engine.interpreter import interpreter_command

_MOST_DESCRIPTORS = 7
_PARENT_CHECK_SECONDS = 1.0
_ORPHAN_SECONDS = 0.3


def serve(control_fd: int, method: str, warm_modules: Sequence[str]) -> NoReturn:
    """Start a rank for every request that comes; never returns.

    Args:
        control_fd: our end of the driver's socket; each byte carries one rank's descriptors.
        method: `fork` or `spawn`.
        warm_modules: imported before the first rank starts.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides when ranks end
    for name in warm_modules:
        importlib.import_module(name)
    gc.freeze()  # the ranks share these pages; a collection must not write to them
    _Server(socket.socket(fileno=control_fd), method).run()


class _Server:
    """The ranks that live, and the loop that starts and reaps them."""

    def __init__(self, control: socket.socket, method: str) -> None:
        self._control = control
        self._method = method
        self._status_of: dict[int, int] = {}
        self._parent = os.getppid()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # so that it reaches the wake pipe
        signal.set_wakeup_fd(self._wake_write)

    def run(self) -> NoReturn:
        """Serve until the driver is gone."""
        # A process that the driver forked may hold the driver's end open, hence the parent check.
        while os.getppid() == self._parent:
            ready = wait([self._control, self._wake_read], _PARENT_CHECK_SECONDS)
            if self._wake_read in ready:
                os.read(self._wake_read, 512)
                self._reap()
            if self._control in ready and not self._start_rank():
                break
        self._end_ranks()
        os._exit(0)

    def _end_ranks(self) -> None:
        """Wait a moment for ranks to end by themselves, which lets them clean up; kill the rest."""
        give_up = time.monotonic() + _ORPHAN_SECONDS
        while self._status_of and time.monotonic() < give_up:
            wait([self._wake_read], give_up - time.monotonic())
            self._reap()
        for pid in self._status_of:
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid is still its own
            os.waitpid(pid, 0)

    def _start_rank(self) -> bool:
        """Serve one request; False when the driver is gone."""
        try:
            word, passed, _, _ = socket.recv_fds(self._control, 1, _MOST_DESCRIPTORS)
        except ConnectionError:
            return False
        if not word:
            return False
        for descriptor in passed:
            os.set_inheritable(descriptor, False)  # a received descriptor would pass to any child
        *descriptors, status = passed
        pid = self._fork(descriptors, status) if self._method == "fork" else _spawn(descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self._status_of[pid] = status
        _report(status, pid)
        return True

    def _fork(self, descriptors: Sequence[int], status: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            self._forget(status)
            rank_process.run(*descriptors)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # never back into the server's loop, whatever happened

    def _forget(self, own_status: int) -> None:
        """In a new rank: drop what belongs to the server and to other ranks."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        for descriptor in (
            self._wake_read,
            self._wake_write,
            own_status,
            *self._status_of.values(),
        ):
            os.close(descriptor)

    def _reap(self) -> None:
        for pid in list(self._status_of):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                pipe = self._status_of.pop(pid)
                _report(pipe, os.waitstatus_to_exitcode(status))
                os.close(pipe)


def _spawn(descriptors: Sequence[int]) -> int:
    """Start a fresh interpreter that runs a rank."""
    for descriptor in descriptors:
        os.set_inheritable(descriptor, True)
    command = interpreter_command("heddle.engine.executors.rank_process", "run", *descriptors)
    return os.posix_spawn(sys.executable, command, os.environ)


def _report(status: int, word: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the executor is gone; nobody asks any more
        os.write(status, STATUS.pack(word))
