"""Whether the KV writes of a step add up, before any token of it is released."""

from __future__ import annotations

from collections.abc import Sequence

from heddle.errors import PlanMismatch
from heddle.layout.mesh import Mesh
from heddle.step.batch import RankReply
from heddle.step.plan import StepPlan


def check_coverage(replies: Sequence[RankReply], plan: StepPlan, mesh: Mesh) -> None:
    """Each store copy wrote every new position of the step once, in its own slot.

    Args:
        replies: in global rank order.
        plan: the driver's plan of the step.
        mesh: of the engine.
    Raises:
        PlanMismatch: naming the first DCP group whose sum differs.
    """
    for members in mesh.groups("dcp"):
        total = sum(replies[rank].coverage for rank in members) % 2**64
        if total != plan.coverage:
            raise PlanMismatch(
                f"step {plan.batch.step}: ranks {list(members)} wrote KV that sums to "
                f"{total:#018x}, the layout says {plan.coverage:#018x}; "
                "nothing of this step is released"
            )
