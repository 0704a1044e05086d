"""The row that is looked at is the last known one of its request, on each rank that computes it."""

from __future__ import annotations

import msgspec
import pytest

from heddle.config import SamplingParams
from heddle.step.batch import GlobalBatch, RankReply, SampleSpec
from heddle.step.draw_params import DrawParams
from heddle.step.localize import localize
from heddle.step.plan import plan
from heddle.step.probe import NO_PROBE, probed_request, probed_row, rows_by_layer
from heddle.step.topology import Topology
from tests.support.batches import make_batch, make_topology

SPEC = SampleSpec(params=DrawParams.of(SamplingParams()), seed=0, choice=0, position=0)


def batch_of(topology: Topology, num_samples: tuple[int, ...], probe: int) -> GlobalBatch:
    batch = make_batch(topology, [(9, 1), (0, 13), (4, 3)])
    requests = [
        msgspec.structs.replace(request, samples=(SPEC,) * count)
        for request, count in zip(batch.requests, num_samples, strict=True)
    ]
    return msgspec.structs.replace(batch, requests=tuple(requests), probe=probe)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 2), (1, 2, 2), (1, 3, 3)])
@pytest.mark.parametrize(("probe", "position"), [(100, 9), (101, 12), (102, 4)])
def test_some_rank_has_the_row_and_no_rank_another(
    sizes: tuple[int, int, int], probe: int, position: int
) -> None:
    """The last request has two drafts, behind the row that is looked at."""
    topology = make_topology(sizes)
    batch = batch_of(topology, (1, 1, 3), probe)
    step_plan = plan(batch, topology)
    places = []
    for rank in range(topology.mesh.world_size):
        step = localize(step_plan, topology, rank)
        row = probed_row(step)
        if row is not None:
            request = batch.requests[step.request_of_row[row]]
            places.append((request.request_id, int(step.positions[row])))
    assert places
    assert set(places) == {(probe, position)}


def test_nobody_looks_at_a_part_that_draws_nothing_or_is_absent() -> None:
    topology = make_topology((1, 1, 1))
    for batch in (
        batch_of(topology, (1, 0, 1), 101),
        batch_of(topology, (1, 1, 1), NO_PROBE),
        batch_of(topology, (1, 1, 1), 55),
    ):
        assert probed_row(localize(plan(batch, topology), topology, 0)) is None
    assert probed_request(batch_of(topology, (1, 1, 1), 55)) is None


def test_a_look_is_part_of_the_plan() -> None:
    topology = make_topology((1, 1, 1))
    first, second = (batch_of(topology, (1, 1, 1), probe) for probe in (100, 101))
    assert plan(first, topology).digest != plan(second, topology).digest


def test_rows_are_sorted_by_layer_and_named_by_rank() -> None:
    replies = [
        RankReply(epoch=0, step=0, digest=0, coverage=(), probe=probe)
        for probe in (((2, b"a"), (3, b"b")), (), ((0, b"c"), (2, b"d")))
    ]
    found = rows_by_layer(replies, first_rank=4)
    assert found == {0: {6: b"c"}, 2: {4: b"a", 6: b"d"}, 3: {4: b"b"}}
    assert list(found) == [0, 2, 3]
