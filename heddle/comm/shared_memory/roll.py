"""Who is there, who has left, who has failed: seen by any rank that waits, without a driver.

    absent -> present -> departed      said that no more calls will come
                      -> failed        left its last words, and ends
                      -> (gone)        died without a word

A rank that is present holds a lock on one byte of the segment's file. The kernel drops the lock
when the process ends, in whatever way, and whoever can take it knows that its owner is gone. (Such
locks belong to a process and are not inherited; a copy in a child means nothing.)
The first thing that goes wrong ends the whole world, as it does between threads.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable
from contextlib import suppress

from heddle.comm.members import Members
from heddle.comm.shared_memory.geometry import FAILURE_WORD, LAST_WORDS, PAGE_BYTES
from heddle.comm.shared_memory.segment import Segment, digest_of, word_index
from heddle.errors import HeddleError, PlanMismatch, RankFailed
from heddle.layout.mesh import GROUP_KINDS, GroupKind

_ABSENT, _PRESENT, _DEPARTED, _FAILED = range(4)
_ARRIVAL_POLL_SECONDS = 0.001
_FAILURE = word_index(FAILURE_WORD)
_MOST_WORDS = PAGE_BYTES - LAST_WORDS


class Roll:
    """The state of all ranks, as one rank sees it."""

    def __init__(self, segment: Segment, rank: int) -> None:
        """Take this rank's place.

        Raises:
            HeddleError: another process has it.
        """
        self._segment = segment
        self._rank = rank
        self._world_size = segment.geometry.world_size
        self._flags = segment.geometry.flags
        self._failure: HeddleError | None = None
        try:
            fcntl.lockf(segment.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError as error:
            raise HeddleError(f"rank {rank} of this world is another process already") from error
        self._set(_PRESENT)

    @property
    def has_failed(self) -> bool:
        """True once anything has gone wrong on any rank."""
        return self._segment.words[_FAILURE] != 0

    def form(self, kind: GroupKind, lists: Members) -> None:
        """Note from which partition this rank forms a kind of group.

        Raises:
            PlanMismatch: another rank has formed it from another one. Of two that disagree, the
                later one is told here, the other one where it waits.
        """
        index = GROUP_KINDS.index(kind)
        digest = digest_of(repr(lists))
        self._segment.words[self._partition(self._rank, index)] = digest
        os.sched_yield()  # the kernel takes a lock: what was stored is seen before we look
        for rank in range(self._world_size):
            if self._segment.words[self._partition(rank, index)] not in (0, digest):
                raise self.fail(
                    PlanMismatch(
                        f"{kind} groups {lists} of rank {self._rank} differ from those of rank "
                        f"{rank}"
                    )
                )

    def await_all(self, seconds: float) -> None:
        """Return once every rank has come.

        Raises:
            RankFailed: some have not within `seconds`, or one has failed.
        """
        give_up = time.monotonic() + seconds
        while missing := [rank for rank in range(self._world_size) if not self._flag(rank)]:
            self.check(f"rank {self._rank} waits for ranks {missing}")
            if time.monotonic() > give_up:
                raise RankFailed(
                    f"rank {self._rank}: {self._world_size} ranks did not form a group within "
                    f"{seconds} s; missing ranks: {missing}"
                )
            time.sleep(_ARRIVAL_POLL_SECONDS)

    def check(self, what: str) -> None:
        """Raise if the world has failed; `what` names the call that ends with it.

        Raises:
            PlanMismatch: ranks disagree.
            RankFailed: a rank failed first.
        """
        if not self.has_failed:
            return
        if self._failure is None:
            flags = bytes(self._segment.octets[self._flags : self._flags + self._world_size])
            self._failure = self._error_of(flags.index(_FAILED), what)
        raise type(self._failure)(*self._failure.args)

    def check_peers(self, what: str, missing: Iterable[int]) -> None:
        """Raise if one of the ranks that are waited for will never come.

        Raises:
            PlanMismatch: it has left the world.
            RankFailed: its process has ended.
        """
        missing = list(missing)
        left = [rank for rank in missing if self._flag(rank) == _DEPARTED]
        if left:
            raise self.fail(PlanMismatch(f"{what}: ranks {left} returned without making it"))
        for rank in missing:
            if self._is_gone(rank):
                self.check(what)  # it may have said why
                raise self.fail(
                    RankFailed(f"{what}: a peer is gone: the process of rank {rank} has ended")
                )

    def fail(self, error: HeddleError) -> HeddleError:
        """Note that this rank's call failed, for all ranks; returns the error, to be raised."""
        self.abort(error)
        return error

    def abort(self, error: BaseException) -> None:
        """End the world, unless it has ended before."""
        if self._failure is not None:
            return
        name = type(error).__name__
        again = PlanMismatch if isinstance(error, PlanMismatch) else RankFailed
        self._failure = again(f"the world has failed before: {name}: {error}")
        self._segment.write_text(self._last_words(self._rank), _MOST_WORDS, f"{name}: {error}")
        self._set(_FAILED)
        self._segment.words[_FAILURE] = 1

    def leave(self) -> None:
        """Say that this rank makes no more calls."""
        if self._flag(self._rank) == _PRESENT:
            self._set(_DEPARTED)

    def _error_of(self, rank: int, what: str) -> HeddleError:
        words = self._segment.text(self._last_words(rank), _MOST_WORDS)
        name, _, text = words.partition(": ")
        if name == PlanMismatch.__name__:
            return PlanMismatch(text)
        return RankFailed(f"{what}: rank {rank} failed first: {words}")

    def _partition(self, rank: int, index: int) -> int:
        return word_index(self._segment.geometry.record(rank)) + index

    def _last_words(self, rank: int) -> int:
        return self._segment.geometry.record(rank) + LAST_WORDS

    def _is_gone(self, rank: int) -> bool:
        """True once the process of a rank that had come has ended."""
        try:
            fcntl.lockf(self._segment.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        with suppress(OSError):
            fcntl.lockf(self._segment.descriptor, fcntl.LOCK_UN, 1, rank)
        return True

    def _flag(self, rank: int) -> int:
        return self._segment.octets[self._flags + rank]

    def _set(self, flag: int) -> None:
        self._segment.octets[self._flags + self._rank] = flag
