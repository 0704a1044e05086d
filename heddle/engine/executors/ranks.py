"""The rank processes of one executor: their channels, their ends, their words.

How a process is started and reached differs (`RankProcesses`: by a launcher of this host); what is
said to it, and how its end is seen, does not (`Ranks`).

Everything here is non-blocking towards a rank: a stopped rank neither reads nor answers, and must
not hold up the driver. Ends and messages are awaited together; what a rank managed to say before
its end is delivered before the end.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from heddle.engine.executors.frames import FrameDecoder, encode_frame
from heddle.engine.executors.launcher import RankDescriptors, RankHandle, RankLauncher
from heddle.engine.executors.messages import Failed, FromRank, Stop
from heddle.engine.executors.rank_process import STACKS_SIGNAL
from heddle.engine.executors.relay import OutputRelay
from heddle.errors import HeddleError
from heddle.faults.page import Standing, create_page, look

_CHUNK_BYTES = 1 << 18
_STOP_SECONDS = 2.0
"""Grace of an idle rank that was asked to leave."""
_REAP_SECONDS = 5.0
"""Longest wait for the end of a killed process."""
_STACKS_SECONDS = 0.5
"""Longest wait for stack dumps."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A rank process is gone."""

    exit_code: int | None
    """Negative for a signal; None if its launcher went first."""
    why: str = ""
    """What is known beside the exit code, in words for an error; may be empty."""


@dataclass(slots=True)
class _Rank:
    """The driver's side of one rank."""

    number: int
    handle: RankHandle
    channel: socket.socket
    decoder: FrameDecoder[FromRank]
    outbox: memoryview


class Ranks(ABC):
    """N rank processes, from launch to the last descriptor; but for their start."""

    def __init__(self, labels: Sequence[str]) -> None:
        """Start nothing yet.

        Args:
            labels: one for each rank, for its lines of output.
        """
        self.is_idle = False
        """True while no rank works: only then can they be asked to leave."""
        self._owner = os.getpid()
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        self._resources = ExitStack()
        self._resources.callback(self._selector.close)
        self._relay = OutputRelay(labels)
        self._relay_end = self._resources.enter_context(ExitStack())
        self._relay_end.callback(self._relay.close)

    @abstractmethod
    def launch(self, deadline: float) -> None:
        """Start all processes; `deadline` is monotonic time.

        Raises:
            RankFailed, RanksFailed: they do not start.
        """

    @abstractmethod
    def dump_stacks(self) -> dict[int, str]:
        """Stacks of all threads of every rank that can still be asked, by rank."""

    def standings(self) -> list[Standing]:
        """Where the ranks stand, in order of rank; those are left out that nobody here can see."""
        return []

    def _enlist(self, handle: RankHandle, channel: socket.socket) -> None:
        """Take up a rank that is being started; the next one in order."""
        channel.setblocking(False)
        decoder: FrameDecoder[FromRank] = FrameDecoder(FromRank)
        number = len(self._ranks)
        self._ranks.append(_Rank(number, handle, channel, decoder, memoryview(b"")))

    def _watch_all(self, deadline: float) -> None:
        """Wait for the processes, and from now on hear what they say and see them end."""
        for rank in self._ranks:
            rank.handle.read_pid(deadline)
            self._selector.register(rank.handle.status, selectors.EVENT_READ, (rank, True))
            self._selector.register(rank.channel, selectors.EVENT_READ, (rank, False))

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids in order of rank."""
        return tuple(rank.handle.pid for rank in self._ranks)

    def set_epoch(self, epoch: int) -> None:
        """Epoch to show in log lines from now on."""
        self._relay.epoch = epoch

    def last_words(self, rank: int) -> str:
        """Last lines that a rank wrote to stderr; complete after `kill`."""
        return self._relay.tail(rank)

    def send(self, rank: int, frame: bytes) -> None:
        """Hand a frame to a rank; what its socket does not take now goes out during `poll`."""
        state = self._ranks[rank]
        state.outbox = memoryview(bytes(state.outbox) + frame if state.outbox else frame)
        self._flush(state)

    def poll(self, timeout: float) -> Iterator[tuple[int, FromRank | Ended]]:
        """Yield (rank, what came of it) for all that has happened, waiting at most `timeout`."""
        for key, mask in self._selector.select(timeout):
            rank, is_end = key.data
            if is_end:
                yield from self._read(rank)  # what it said before its end comes first
                self._selector.unregister(rank.handle.status)
                rank.handle.read_exit()
                yield rank.number, Ended(rank.handle.exit_code, rank.handle.why)
                continue
            if mask & selectors.EVENT_WRITE:
                self._flush(rank)
            if mask & selectors.EVENT_READ:
                yield from self._read(rank)

    def kill(self) -> None:
        """End every process now, and read its last words."""
        for rank in self._ranks:
            rank.handle.signal(signal.SIGKILL)
        self._await_ends(_REAP_SECONDS)
        self._relay_end.close()

    def close(self) -> None:
        """End every process, politely if all are idle, and free all that is left of them."""
        if os.getpid() != self._owner:
            return  # a fork of the driver: the ranks are not its children to end
        if self.is_idle:
            for rank in self._ranks:
                self.send(rank.number, encode_frame(Stop()))
            self._await_ends(_STOP_SECONDS)
        self.is_idle = False
        self.kill()
        self._ranks = []
        self._resources.close()

    def _await_ends(self, seconds: float) -> None:
        give_up = time.monotonic() + seconds
        while any(rank.handle.pid and not rank.handle.is_gone for rank in self._ranks):
            remaining = give_up - time.monotonic()
            if remaining <= 0:
                return
            for _ in self.poll(remaining):
                pass  # late messages interest nobody

    def _flush(self, rank: _Rank) -> None:
        try:
            sent = rank.channel.send(rank.outbox) if rank.outbox else 0
        except BlockingIOError:
            sent = 0
        except OSError:  # its end is on the way, and says more than this error
            sent = len(rank.outbox)
        rank.outbox = rank.outbox[sent:]
        waiting = selectors.EVENT_WRITE if rank.outbox else 0
        key = self._selector.get_map().get(rank.channel)
        if key is not None and key.events != selectors.EVENT_READ | waiting:
            self._selector.modify(rank.channel, selectors.EVENT_READ | waiting, key.data)

    def _read(self, rank: _Rank) -> Iterator[tuple[int, FromRank]]:
        """Messages that have arrived completely; a damaged stream reads as a failure."""
        while rank.channel in self._selector.get_map():
            try:
                piece = rank.channel.recv(_CHUNK_BYTES)
            except BlockingIOError:
                return
            except OSError:  # reset, or its host has been silent for too long
                piece = b""
            if not piece:
                self._selector.unregister(rank.channel)
                return
            try:
                for message in rank.decoder.feed(piece):
                    yield rank.number, message
            except HeddleError as error:
                self._selector.unregister(rank.channel)
                yield rank.number, Failed(str(error), "RankFailed", "", False, False)


class RankProcesses(Ranks):
    """Ranks that a launcher of this host starts."""

    def __init__(
        self,
        labels: Sequence[str],
        launcher: RankLauncher,
        owns_launcher: bool,
        segment: int | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            labels: one for each rank, for its lines of output.
            launcher: starts the processes.
            owns_launcher: end it with the ranks.
            segment: descriptor of memory that all ranks share, closed here once they have it.
        """
        super().__init__(labels)
        if owns_launcher:
            self._resources.callback(launcher.close)
        self._launcher = launcher
        self._segment = segment
        self._stacks: list[int] = []
        self._pages: list[int] = []

    def launch(self, deadline: float) -> None:
        """Start all processes; see `Ranks.launch`."""
        death_read, death_write = os.pipe()
        self._resources.callback(os.close, death_write)
        try:
            for number in range(self._relay.num_ranks):
                self._launch_one(number, death_read)
        finally:
            os.close(death_read)
            if self._segment is not None:
                os.close(self._segment)
            self._relay.start()
        self._watch_all(deadline)

    def _launch_one(self, number: int, death: int) -> None:
        ours, theirs = socket.socketpair()
        self._resources.callback(ours.close)
        nameless = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the other resources
        stacks = self._resources.enter_context(nameless).fileno()
        page = create_page()
        self._resources.callback(os.close, page)
        with theirs:
            handle = self._launcher.launch(
                RankDescriptors(
                    channel=theirs.fileno(),
                    death=death,
                    output=self._relay.write_end(number),
                    stacks=stacks,
                    page=page,
                    segment=self._segment,
                )
            )
        self._resources.callback(handle.close)
        self._stacks.append(stacks)
        self._pages.append(page)
        self._enlist(handle, ours)

    def kill(self) -> None:
        """End every process; see `Ranks.kill`. A launcher that reaps none of them is noted."""
        super().kill()
        if any(not rank.handle.is_gone for rank in self._ranks):
            self._launcher.is_silent = True

    def dump_stacks(self) -> dict[int, str]:
        """Stacks of every rank; see `Ranks.dump_stacks`."""
        for rank in self._ranks:
            rank.handle.signal(STACKS_SIGNAL)
            rank.handle.signal(signal.SIGCONT)  # a stopped process must run to write its stacks
        return {number: dump for number, dump in enumerate(read_stacks(self._stacks)) if dump}

    def standings(self) -> list[Standing]:
        """Where each rank stands, also one that is stopped or dead; see `Ranks.standings`."""
        return [standing for page in self._pages if (standing := look(page)) is not None]


def read_stacks(files: Sequence[int]) -> list[str]:
    """What ranks that were told to have written to their stacks files, once they have.

    Args:
        files: descriptors, one for each rank.
    """
    give_up = time.monotonic() + _STACKS_SECONDS
    sizes: list[int] = []
    while time.monotonic() < give_up:
        time.sleep(0.05)
        before, sizes = sizes, [os.fstat(file).st_size for file in files]
        if sizes == before and all(sizes):
            break
    return [os.pread(file, 1 << 20, 0).decode("utf-8", "replace") for file in files]
