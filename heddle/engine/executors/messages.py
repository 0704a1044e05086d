"""What a driver and a rank process say to each other: typed structs, never pickled.

    driver                    rank
    Start  ------------------>   form groups, load weights
           <------------------   Progress ..., then Ready or Failed
    Step   ------------------>   one step, after those before it
           <------------------   Reply or Failed
    Stop   ------------------>   leave

A rank that has sent `Failed` ends. Every message is one frame (`frames`). Launched ranks hear
`Round` and `Collect` instead of `Step` (`torchrun`).
"""

from __future__ import annotations

import msgspec

from heddle.config.engine import ResolvedConfig
from heddle.engine.executors.failure import Failure
from heddle.step.batch import GlobalBatch, RankReply


class Rendezvous(msgspec.Struct, frozen=True):
    """Where the ranks of several hosts meet: rank 0 listens there."""

    address: str
    port: int


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message: everything that makes a rank."""

    resolved: ResolvedConfig
    global_rank: int
    worker: str
    """`module:attribute` of the worker factory."""
    store_directory: str
    """Private folder in which the ranks find each other; empty once all are ready."""
    rendezvous: Rendezvous | None = None
    """Where ranks of several hosts find each other instead."""
    identity: dict[str, str] = {}
    """The driver's settings and versions; see `heddle.step.identity`."""


class Agreement(msgspec.Struct, frozen=True, tag=True):
    """The configuration that all launched ranks run."""

    resolved: ResolvedConfig
    identity: dict[str, str]
    """The driver's settings and versions; see `heddle.step.identity`."""


class Step(msgspec.Struct, frozen=True, tag=True):
    """Run one step."""

    batch: GlobalBatch
    digest: int
    seconds: float
    """Collectives end this long after the rank begins; hosts share no clock."""


class Round(msgspec.Struct, frozen=True, tag=True):
    """Begin a step of each named replica, in the background."""

    steps: dict[int, Step]


class Collect(msgspec.Struct, frozen=True, tag=True):
    """Gather the replies to the oldest step of a replica; the other ranks send nothing."""

    replica: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End politely."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Weights loaded so far."""

    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The rank can run steps."""


class Reply(msgspec.Struct, frozen=True, tag=True):
    """The answer to a step."""

    reply: RankReply


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The rank raised, and ends; fields as in `Failure`."""

    text: str
    kind: str
    detail: str
    is_derived: bool
    is_timeout: bool
    mismatch: str = ""
    sketch: dict[str, str] = {}

    @classmethod
    def of(cls, failure: Failure) -> Failed:
        """What of a failure can travel: all but the exception itself."""
        return cls(
            failure.text,
            failure.kind,
            failure.detail,
            failure.is_derived,
            failure.is_timeout,
            failure.mismatch,
            dict(failure.sketch),
        )

    def failure(self, rank: int) -> Failure:
        """The failure of `rank`."""
        return Failure(
            rank=rank,
            text=self.text,
            kind=self.kind,
            detail=self.detail,
            is_derived=self.is_derived,
            is_timeout=self.is_timeout,
            mismatch=self.mismatch,
            sketch=self.sketch,
        )


ToRank = Start | Step | Stop
ToSeat = Round | Collect | Stop
FromRank = Progress | Ready | Reply | Failed
