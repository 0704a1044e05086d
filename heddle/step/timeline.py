"""What a rank did when, in one step: parts of its work, and its collectives.

Times are seconds of the monotonic clock, which all processes of a host share.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from heddle.layout.mesh import GroupKind

Part = Literal[
    "plan", "embedding", "projection", "attention", "output", "mlp", "logits", "sampling"
]
"""What a rank works at.

`projection` is the norm and the way to queries, keys and values; `attention` the writing of new
rows, the exchanges and the merge, or a recurrence; `output` the way back from heads and its sum
over TP, and whatever follows until the model says that another part begins.
"""


class PartBegin(msgspec.Struct, frozen=True, array_like=True):
    """From here on, until the next part begins or the step ends."""

    part: Part
    layer: int
    """-1: it belongs to the layer of its neighbours, or to none."""
    began: float


class TimedCall(msgspec.Struct, frozen=True, array_like=True):
    """One collective, or the wait for a transfer that was begun by one."""

    op: str
    """A `CollectiveOp`, or `wait`."""
    group: GroupKind
    num_bytes: int
    """That this rank receives; of a wait 0, its call has them."""
    began: float
    ended: float


class StepTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's step; the first part begins it."""

    parts: tuple[PartBegin, ...]
    calls: tuple[TimedCall, ...]
    ended: float
