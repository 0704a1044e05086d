"""A description is compiled in a helper process first: what runs away there hurts nobody.

    driver                                    helper
    tokens, once ------------------------->   Vocabulary
    description -------------------------->   Grammar, within limits
                 <------- nothing, or why not

The library counts its work, but not all of it: an intersection of twenty expressions in 600 bytes
of schema takes 3 s and 200 MB, one of thirty has no end. It cannot be broken off, so its process
is: by the kernel, when its time is over or its memory is spent. What was compiled there compiles
in the driver in the same time.
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

from heddle.engine.executors.launcher import interpreter_command
from heddle.errors import RequestError

MAX_HELPERS = 2
"""That compile at once; further callers wait."""
GRACE_SECONDS = 5.0
"""Beyond its time a helper is killed from here: it was stopped, or the kernel is late."""
START_SECONDS = 60.0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Of one description."""

    seconds: float = 5.0
    memory_bytes: int = 512 << 20
    """Beside what the helper holds already, and beside the stack of the compiling thread."""


DEFAULT_LIMITS = Limits()


class PlainTokens(msgspec.Struct, kw_only=True):
    """What a vocabulary asks of its tokenizer, as plain data."""

    tokens: list[bytes]
    special_ids: set[int]
    strips_first_space: bool

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token."""
        return self.tokens[token_id]

    def is_special(self, token_id: int) -> bool:
        """True for ids that are no text."""
        return token_id in self.special_ids


class Trials:
    """The helpers of one engine, each started when it is needed. Any thread may ask.

    Args:
        tokens: of the vocabulary; called once per helper.
        limits: of one description.
    """

    def __init__(self, tokens: Callable[[], PlainTokens], limits: Limits = DEFAULT_LIMITS) -> None:
        self._tokens = tokens
        self._limits = limits
        self._seats = threading.BoundedSemaphore(MAX_HELPERS)
        self._idle: list[_Helper] = []
        self._is_closed = False
        self._finalizer = weakref.finalize(self, _end, self._idle, os.getpid())

    def run(self, text: str) -> None:
        """Compile a description.

        Args:
            text: in Lark syntax.
        Raises:
            ValueError: the library refuses it, or it takes too much time or memory.
            RequestError: no helper can be had (`invalid_grammar`).
        """
        with self._seats:
            try:
                helper = self._idle.pop()
            except IndexError:
                helper = _Helper(self._tokens(), self._limits)
            try:
                reason = helper.ask(text)
            except BaseException:
                helper.end()
                raise
            self._idle.append(helper)
            if self._is_closed:
                self.close()
        if reason:
            raise ValueError(reason)

    def close(self) -> None:
        """End the idle helpers; those at work end with their descriptions. May be called twice."""
        self._is_closed = True
        _end(self._idle, os.getpid())


class _Helper:
    """The driver's end of one."""

    def __init__(self, tokens: PlainTokens, limits: Limits) -> None:
        self._limits = limits
        self._connection, theirs = Pipe()
        try:
            with theirs:
                self._process = subprocess.Popen(  # noqa: S603 - the interpreter, with our own line
                    interpreter_command(__name__, "serve", theirs.fileno()),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # the library's last words, before it breaks off
                )
        except OSError as error:
            self._connection.close()
            raise RequestError(f"no room to compile it ({error})", "invalid_grammar") from None
        try:
            self._connection.send_bytes(msgspec.msgpack.encode((tokens, limits)))
            if not self._connection.poll(START_SECONDS):
                raise TimeoutError
            self._connection.recv_bytes()
        except (OSError, EOFError):
            self.end()
            raise RequestError("the compiling process did not start", "invalid_grammar") from None
        except BaseException:
            self.end()
            raise

    def ask(self, text: str) -> str:
        """Why a description is refused; empty: it compiles.

        Raises:
            ValueError: it took too much, and the helper has ended.
        """
        limits = self._limits
        too_long = f"compiling it takes more than {limits.seconds:g} s"
        try:
            self._connection.send_bytes(text.encode())
            if not self._connection.poll(limits.seconds + GRACE_SECONDS):
                raise ValueError(too_long)
            return self._connection.recv_bytes().decode()
        except (OSError, EOFError):
            if self._process.wait() == -signal.SIGALRM:
                raise ValueError(too_long) from None
            raise ValueError(
                f"compiling it takes more than {limits.memory_bytes >> 20} MiB, or breaks the "
                "library"
            ) from None

    def end(self) -> None:
        """End it, whatever it does."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def forget(self) -> None:
        """Of a fork of the driver: it holds a copy of the handle, not the process."""
        self._connection.close()
        self._process.returncode = 0


def _end(idle: list[_Helper], owner: int) -> None:
    while idle:
        helper = idle.pop()
        helper.end() if os.getpid() == owner else helper.forget()


def serve(descriptor: int) -> None:
    """The helper: compile what comes until the driver has gone.

    Args:
        descriptor: of the connection to the driver.
    """
    from heddle.engine.grammar.compiler import STACK_BYTES, Grammar
    from heddle.engine.grammar.vocabulary import Vocabulary

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver
    with Connection(descriptor) as driver, contextlib.suppress(EOFError, OSError):
        tokens, limits = msgspec.msgpack.decode(
            driver.recv_bytes(), type=tuple[PlainTokens, Limits]
        )
        vocabulary = Vocabulary(tokens, len(tokens.tokens), ())
        _ = vocabulary.inner
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        most = _data_bytes() + STACK_BYTES + limits.memory_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        driver.send_bytes(b"")
        while True:
            text = driver.recv_bytes().decode()
            # Nobody catches this signal, so the kernel ends the process in the library's midst.
            signal.setitimer(signal.ITIMER_REAL, limits.seconds)
            try:
                Grammar(text, vocabulary)
                reason = ""
            except (ValueError, RequestError) as error:
                reason = str(error) or "no reason given"
            signal.setitimer(signal.ITIMER_REAL, 0)
            driver.send_bytes(reason.encode("utf-8", "replace"))


def _data_bytes() -> int:
    """Writable memory of this process, as the kernel counts it."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no VmData")
