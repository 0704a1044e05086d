"""Whether the ranks' replies to a step agree, before any token of it is released."""

from __future__ import annotations

from collections.abc import Sequence

from heddle.errors import PlanMismatch
from heddle.layout.mesh import Mesh
from heddle.step.batch import RankReply
from heddle.step.plan import StepPlan


def check_replies(replies: Sequence[RankReply], plan: StepPlan, mesh: Mesh) -> None:
    """Same epoch, step and digest everywhere, and each store copy wrote every new position once.

    Args:
        replies: in global rank order.
        plan: the driver's plan of the step.
        mesh: of the engine.
    Raises:
        PlanMismatch: naming the first rank or DCP group that differs.
    """
    expected = (plan.batch.epoch, plan.batch.step, plan.digest)
    for rank, reply in enumerate(replies):
        found = (reply.epoch, reply.step, reply.digest)
        if found != expected:
            raise PlanMismatch(
                f"rank {rank} answered (epoch, step, digest) {found}, the driver asked for "
                f"{expected}; nothing of this step is released"
            )
    for members in mesh.groups("dcp"):
        total = sum(replies[rank].coverage for rank in members) % 2**64
        if total != plan.coverage:
            raise PlanMismatch(
                f"step {plan.batch.step}: ranks {list(members)} wrote KV that sums to "
                f"{total:#018x}, the layout says {plan.coverage:#018x}; nothing of this step is released"
            )
