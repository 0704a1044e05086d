"""Pads among COPY rows: real rows stay what they are, and ranks say what more rows would have them
say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from heddle.layout.rows import RowClass, RowRequest
from heddle.step.batch import GlobalBatch, ScheduledRequest
from heddle.step.local_group import localize_group
from heddle.step.localize import localize
from heddle.step.padding import pad_group, pad_rows, unlike_reason
from heddle.step.placement import Placed
from heddle.step.plan import plan
from heddle.step.schedule import collective_schedule
from heddle.step.topology import Topology
from tests.support.batches import by_length, make_batch, make_topology, topologies


def copies(requests: Sequence[ScheduledRequest], topology: Topology) -> Placed:
    return Placed(tuple(RowRequest(len(r.token_ids), RowClass.COPY) for r in requests), ())


decodes = st.lists(st.tuples(st.integers(0, 40), st.just(1)), min_size=1, max_size=5)


@given(topologies(), decodes, st.integers(0, 4))
def test_real_rows_stay_and_pads_are_nobodys(
    topology: Topology, lengths: list[tuple[int, int]], num_pads: int
) -> None:
    topology = dataclasses.replace(topology, row_policy=copies)
    step_plan = plan(make_batch(topology, lengths), topology)
    count, wanted = len(lengths), len(lengths) + num_pads
    for rank in range(topology.mesh.world_size):
        step = localize(step_plan, topology, rank)
        padded = pad_rows(step, wanted)
        assert (padded.num_copy, padded.num_local_rows) == (wanted, wanted)
        for name in ("token_ids", "positions"):
            found = getattr(padded, name)
            assert found.tolist() == [*getattr(step, name).tolist(), *[0] * num_pads]
        requests = list(range(count))
        assert padded.request_of_row.tolist() == [*requests, *[-1] * num_pads]
        assert padded.per_row(list(range(10, 10 + count)), pad=7).tolist()[count:] == [7] * num_pads

        group = localize_group(step, topology, 0)
        wide = pad_group(group, wanted)
        assert wide.slot_mapping.tolist() == [*group.slot_mapping.tolist(), *[-1] * num_pads]
        assert (wide.copy_visible[:, :count] == group.copy_visible).all()
        assert not wide.copy_visible[:, count:].any()
        assert wide.copy_parts == group.copy_parts
        assert wide.coverage == group.coverage


@given(topologies(), decodes, st.integers(0, 4))
def test_gathered_rows_restore_as_before(
    topology: Topology, lengths: list[tuple[int, int]], num_pads: int
) -> None:
    topology = dataclasses.replace(topology, row_policy=copies)
    step = localize(plan(make_batch(topology, lengths), topology), topology, 0)
    rows = pad_rows(step, len(lengths) + num_pads).plan.rows
    gathered = np.concatenate([rows.local_rows(rank) for rank in range(rows.pcp_size)])
    assert gathered[rows.restore].tolist() == list(range(len(lengths)))
    assert rows.canon[rows.restore].all()
    assert rows.canon.sum() == len(lengths)
    assert rows.valid.sum() == rows.pcp_size * len(lengths)


@given(topologies(), decodes, st.integers(1, 4))
def test_collectives_are_those_of_as_many_real_rows(
    topology: Topology, lengths: list[tuple[int, int]], num_pads: int
) -> None:
    topology = dataclasses.replace(topology, row_policy=copies)
    few, many = (
        plan(make_batch(topology, some), topology)
        for some in (lengths, [*lengths, *[(40, 1)] * num_pads])
    )

    def returns(step_plan):  # type: ignore[no-untyped-def]
        return [part.returns for group in step_plan.groups for part in group.classes.values()]

    assume(returns(few) == returns(many))  # prices may favour another exchange for more rows
    for rank in range(topology.mesh.world_size):
        padded = pad_rows(localize(few, topology, rank), len(lengths) + num_pads).plan
        found = collective_schedule(padded, topology, rank)
        wanted = collective_schedule(many, topology, rank)
        assert (found.prologue, found.layers) == (wanted.prologue, wanted.layers)


def test_rows_that_are_distributed_take_no_pads() -> None:
    topology = make_topology((1, 2, 1), row_policy=by_length)
    step = localize(plan(make_batch(topology, [(0, 9)]), topology), topology, 0)
    assert pad_rows(step, step.num_copy) is step
    with pytest.raises(AssertionError, match="pads follow the COPY rows"):
        pad_rows(step, 3)


def test_fewer_rows_are_no_padding() -> None:
    topology = make_topology((1, 1, 1), row_policy=copies)
    step = localize(plan(make_batch(topology, [(3, 1), (4, 1)]), topology), topology, 0)
    with pytest.raises(AssertionError, match="more rows than it has"):
        pad_rows(step, 1)


def test_why_a_step_is_like_no_other() -> None:
    topology = make_topology((1, 2, 1), row_policy=copies)
    batch = make_batch(topology, [(3, 1), (4, 1)])

    def reason(topology: Topology = topology, batch: GlobalBatch = batch) -> str | None:
        # Of these facts only the model's presence is asked, so a plan for other layers serves.
        return unlike_reason(dataclasses.replace(step_plan, batch=batch), topology)

    step_plan = plan(batch, topology)
    assert reason() is None
    for field, words in (
        ("recurrent", "recurrent layers"),
        ("sparse", "sparse layers"),
        ("foreign", "layers of transformers"),
    ):
        model = dataclasses.replace(topology.model, **{field: object()})
        assert reason(dataclasses.replace(topology, model=model)) == words
    dealt = dataclasses.replace(topology, has_expert_parallel=True)
    assert reason(dealt) == "experts dealt to ranks"
    assert reason(dataclasses.replace(topology, lanes=2)) == "canonical lanes"
    adapted = msgspec.structs.replace(batch.requests[1], adapter_slot=0)
    assert (
        reason(batch=msgspec.structs.replace(batch, requests=(batch.requests[0], adapted)))
        == "adapters"
    )
    cut = make_topology((1, 2, 1), row_policy=by_length)
    assert unlike_reason(plan(make_batch(cut, [(0, 9)]), cut), cut) == "distributed rows"
