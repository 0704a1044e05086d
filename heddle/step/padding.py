"""Steps whose COPY rows are padded to a count that other steps have too.

Graphs of a device are captured for a few row counts. A pad is a row that is nobody's: its token and
position are 0, its slot is -1, which no write stores, it meets no key, and no logits are taken of
it. Whether and how a step is padded follows from its plan, so ranks agree without a word, and the
schedule of collectives is derived from the padded rows.

    | COPY rows | pads |       num_rows = 4, of which 1 is a pad
    0           3      4
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from heddle.layout.rows import RowLayout
from heddle.step.local_group import GroupStep
from heddle.step.localize import RankStep
from heddle.step.plan import StepPlan
from heddle.step.topology import Topology
from heddle.units import PAD_SLOT_ID

_Scalar = TypeVar("_Scalar", bound=np.generic)


def unlike_reason(plan: StepPlan, topology: Topology) -> str | None:
    """Why the layers do more in a step than any step of as many COPY rows has them do.

    Args:
        plan: of the step.
        topology: constants of the engine.

    Returns:
        None: nothing stands in the way of computing it like others.
    """
    model = topology.model
    reasons = {
        "distributed rows": plan.rows.num_distributed > 0,
        "adapters": any(request.adapter_slot >= 0 for request in plan.batch.requests),
        "recurrent layers": model.recurrent is not None,
        "sparse layers": model.sparse is not None,
        "layers of transformers": model.foreign is not None,
        "experts dealt to ranks": topology.has_expert_parallel,
        "canonical lanes": topology.lanes is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def pad_rows(step: RankStep, num_rows: int) -> RankStep:
    """A rank's part of a step of COPY rows alone, with pads.

    Args:
        step: without distributed rows, where pads are wanted.
        num_rows: at least the COPY rows of the step.
    """
    rows = step.plan.rows
    num_pads = num_rows - rows.num_copy
    if num_pads == 0:
        return step
    assert rows.num_distributed == 0, "pads follow the COPY rows, where distributed rows would be"
    assert num_pads > 0, "a step is padded to more rows than it has"
    return replace(
        step,
        plan=replace(step.plan, rows=_padded_layout(rows, num_rows)),
        token_ids=np.pad(step.token_ids, (0, num_pads)),
        positions=np.pad(step.positions, (0, num_pads)),
        request_of_row=np.pad(step.request_of_row, (0, num_pads), constant_values=-1),
    )


def pad_group(group: GroupStep, num_rows: int) -> GroupStep:
    """The same for one cache group: pads are stored nowhere and see nothing.

    Args:
        group: of a step without distributed rows.
        num_rows: as for `pad_rows`.
    """
    num_pads = num_rows - len(group.slot_mapping)
    if num_pads == 0:
        return group
    return replace(
        group,
        slot_mapping=np.pad(group.slot_mapping, (0, num_pads), constant_values=PAD_SLOT_ID),
        copy_visible=np.pad(group.copy_visible, ((0, 0), (0, num_pads))),
    )


def _padded_layout(rows: RowLayout, num_rows: int) -> RowLayout:
    """`gather`, `valid` and `canon` say of pads what they say of those of other classes."""
    num_pads = num_rows - rows.num_copy

    def padded(array: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
        each = np.pad(array.reshape(rows.pcp_size, -1), ((0, 0), (0, num_pads)))
        found = each.reshape(-1)
        found.flags.writeable = False
        return found

    # Canonical copies lie on rank 0, before its pads, so `restore` stays as it is.
    return replace(
        rows,
        num_copy=num_rows,
        gather=padded(rows.gather),
        valid=padded(rows.valid),
        canon=padded(rows.canon),
    )
