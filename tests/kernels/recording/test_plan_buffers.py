"""One memory for the plans of all steps: what kernels see is the plan that was taken last."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from heddle.kernels.paged_decode.plan import PagedPlan
from heddle.kernels.recording.plan_buffers import PlanBuffers
from tests.kernels.paged_decode.paged_inputs import make_case

FIELDS = ("block_tables", "table_of_row", "first", "end")


def make_plan(lengths, blocks=2, block_size=8):
    count = len(lengths)
    return PagedPlan(
        block_tables=1 + np.arange(count * blocks).reshape(count, blocks),
        table_of_row=np.arange(count)[::-1].copy(),
        first=np.zeros(count, dtype=np.int64),
        end=np.array(lengths),
        block_size=block_size,
    )


def test_a_plan_is_taken_whole_and_what_is_beyond_it_is_empty():
    room = PlanBuffers(4, 3, 8, torch.device("cpu"))
    places = [getattr(room.plan, name).data_ptr() for name in FIELDS]
    for lengths in ([9, 3, 16, 1], [5, 7], [16, 2, 8]):
        plan = make_plan(lengths)
        room.take(plan)
        for name in FIELDS:
            kept, said = getattr(room.plan, name).numpy(), getattr(plan, name)
            inside = tuple(map(slice, said.shape))
            assert (kept[inside] == said).all()
            assert kept.sum() == said.sum(), "the rest is 0"
        assert room.plan.longest == 24
    assert [getattr(room.plan, name).data_ptr() for name in FIELDS] == places


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (make_plan([1] * 5), "5 rows .* room for 4 rows"),
        (
            make_plan([1], blocks=4),
            r"\[1, 4\]; there is room for 4 rows with block tables \[4, 3\]",
        ),
        (make_plan([1], block_size=4), "block_size=4; must be 8"),
    ],
    ids=["rows", "blocks", "block size"],
)
def test_a_plan_without_room_is_refused(plan, words):
    with pytest.raises(ValueError, match=words):
        PlanBuffers(4, 3, 8, torch.device("cpu")).take(plan)


def test_kernels_meet_the_keys_of_the_plan_and_pads_meet_none(device):
    from heddle.kernels.paged_decode import reference, triton_gpu
    from heddle.kernels.paged_decode.triton_plan import LaneGroups

    room = PlanBuffers(5, 6, 8, device)
    for lengths in ([20, 1, 41], [3, 40]):
        case = make_case(lengths)
        room.take(case.plan)
        expected = reference.paged_decode(*case.arguments(torch.device("cpu")))
        pads = torch.zeros(5 - len(lengths), *case.query.shape[1:])
        query, pool = torch.cat((case.query, pads)).to(device), case.rows.to(device)
        groups = LaneGroups.of(case.heads, triton_gpu.max_lanes(case.widths), device)
        layer = triton_gpu.LayerForm(case.widths, case.scale)
        out, lse = (part.cpu() for part in triton_gpu.attend(query, pool, room.plan, groups, layer))
        for found, wanted in zip((out, lse), expected, strict=True):
            torch.testing.assert_close(found[: len(lengths)], wanted, atol=1e-5, rtol=0)
        assert (out[len(lengths) :] == 0).all()
        assert (lse[len(lengths) :] == -torch.inf).all()
