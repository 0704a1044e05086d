"""Each row of a rank gets what belongs to its request, and pads get nothing."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.config import RopeConfig
from heddle.runner.row_inputs import create_row_inputs
from heddle.step.localize import localize
from heddle.step.plan import plan
from tests.support.batches import make_batch, make_topology, whole_in_turn

DTYPE = torch.float64


def embeddings_of(request: int, start: int, end: int, width: int) -> bytes:
    """`[end - start, width]`: a row tells whose it is, and where."""
    rows = np.arange(start, end, dtype=np.float64) + 100 * request
    return np.repeat(rows, width).tobytes()


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 1), (1, 3, 3), (2, 2, 2)])
@settings(max_examples=15)
@given(
    parts=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=4
    )
)
def test_given_rows_and_lengths_follow_their_request(sizes, parts) -> None:
    topology = make_topology(sizes, row_policy=whole_in_turn)
    width = topology.model.hidden_size
    model = dataclasses.replace(
        topology.model,
        rope=RopeConfig(rope_type="dynamic", factor=2.0, original_max_position_embeddings=8),
    )
    plain = make_batch(topology, [(cached, count) for cached, count, _ in parts])
    requests = [
        msgspec.structs.replace(
            request,
            embeddings=embeddings_of(index, cached, cached + min(count, num_given), width),
            rope_length=50 + index,
            adapter_slot=index - 1,
        )
        for index, (request, (cached, count, num_given)) in enumerate(
            zip(plain.requests, parts, strict=True)
        )
    ]
    batch = msgspec.structs.replace(plain, requests=tuple(requests))
    step_plan = plan(batch, topology)
    seen = 0
    for rank in range(topology.mesh.world_size):
        step = localize(step_plan, topology, rank)
        rows = create_row_inputs(step, model, DTYPE)
        owner = step.request_of_row
        expected = {
            place
            for place, request in enumerate(owner.tolist())
            if request >= 0 and step.positions[place] < parts[request][0] + min(parts[request][1:])
        }
        places = [] if rows.given is None else rows.given.rows.tolist()
        assert places == sorted(expected)
        values = [] if rows.given is None else rows.given.values
        for place, value in zip(places, values, strict=True):
            assert (value == 100 * owner[place] + step.positions[place]).all()
        assert rows.rope_lengths is not None
        assert rows.rope_lengths.tolist() == [50 + r if r >= 0 else 0 for r in owner.tolist()]
        slots = step.per_row([r.adapter_slot for r in requests], pad=-1)
        assert slots.tolist() == [r - 1 if r >= 0 else -1 for r in owner.tolist()]
        seen += len(places)
    assert seen >= sum(min(count, num) for _, count, num in parts)


def test_nothing_is_made_that_the_model_does_not_ask_for() -> None:
    topology = make_topology((1, 1, 1))
    step = localize(plan(make_batch(topology, [(0, 3)]), topology), topology, 0)
    rows = create_row_inputs(step, topology.model, DTYPE)
    assert (rows.rope_lengths, rows.given) == (None, None)
    assert (rows.token_ids.tolist(), rows.positions.tolist()) == ([0, 1, 2], [0, 1, 2])


def test_an_idle_replica_has_no_rows() -> None:
    topology = make_topology((1, 2, 1))
    step = localize(plan(make_batch(topology, []), topology), topology, 1)
    assert step.per_row([], pad=7).tolist() == [7] * len(step.token_ids)
    assert create_row_inputs(step, topology.model, DTYPE).given is None
