from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from heddle.kernels.paged_decode.plan import PagedPlan
from heddle.kernels.paged_decode.triton_plan import DevicePlan, LaneGroups, choose_splits

CPU = torch.device("cpu")


@given(heads=st.lists(st.integers(-1, 3), max_size=40), most=st.sampled_from([16, 32]))
def test_each_lane_is_in_one_group_of_its_head(heads, most):
    groups = LaneGroups.of(np.array(heads, dtype=np.int32), most, CPU)
    found = [
        (lane, head)
        for head, lanes in zip(groups.heads.tolist(), groups.lanes.tolist(), strict=True)
        for lane in lanes
        if lane >= 0
    ]
    assert sorted(found) == list(enumerate(heads))
    assert groups.lanes.shape[1] in (16, most)
    assert groups.heads.dtype == groups.lanes.dtype == torch.int32


def test_a_group_is_no_wider_than_it_must_be():
    heads = np.repeat(np.arange(2, dtype=np.int32), [20, 3])
    assert LaneGroups.of(heads, 64, CPU).lanes.shape == (2, 32)
    assert LaneGroups.of(heads, 16, CPU).lanes.shape == (3, 16)


def test_the_plan_on_a_device_holds_the_same_numbers():
    plan = PagedPlan(
        block_tables=np.array([[3, 1], [2, 0]]),
        table_of_row=np.array([0, 1, 1]),
        first=np.array([0, 2, 5]),
        end=np.array([7, 3, 5]),
        block_size=4,
    )
    found = DevicePlan.of(plan, CPU)
    for name in ("block_tables", "table_of_row", "first", "end"):
        tensor = getattr(found, name)
        assert tensor.dtype == torch.int32
        assert tensor.tolist() == getattr(plan, name).tolist()
    assert (found.block_size, found.longest) == (4, 7)


def test_splits_fill_the_device_and_stay_long(monkeypatch):
    class Properties:
        multi_processor_count = 100

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    cuda = torch.device("cuda")
    assert choose_splits(1, 1 << 20, CPU) == 1
    assert choose_splits(1, 1 << 20, cuda) == 128
    assert choose_splits(4, 1 << 20, cuda) == 50
    assert choose_splits(4, 1024, cuda) == 4
    assert choose_splits(300, 1 << 20, cuda) == 1
    assert choose_splits(1, 3, cuda) == 1
    assert choose_splits(0, 0, cuda) == 1
