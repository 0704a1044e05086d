"""Every gathered row belongs to its request and has its own position; pads belong to none."""

from __future__ import annotations

import pytest

from heddle.attention.backends import create_backend
from heddle.attention.resources import AttentionResources
from heddle.attention.sparse.create import create_sparse_rows
from heddle.comm.threads import ThreadGroup, ThreadWorld
from heddle.runner.guard import ScheduleGuard
from heddle.step.localize import localize
from heddle.step.plan import plan
from tests.attention.sparse.bench import draw_sequences, filled_store, sparse_topology
from tests.support.attention_bench import form_groups
from tests.support.batches import make_batch, whole_in_turn


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 3, 3), (2, 2, 4), (1, 4, 2), (2, 2, 1)], ids=str)
def test_gathered_rows_are_those_of_the_pcp_ranks_of_the_group(
    sizes: tuple[int, int, int],
) -> None:
    topology = sparse_topology(sizes, row_policy=whole_in_turn)
    batch = make_batch(topology, [(9, 7), (0, 12), (20, 5), (2, 1), (0, 3)])
    step_plan = plan(batch, topology)
    found = draw_sequences(batch, has_ties=True)

    def body(world: ThreadWorld) -> list[tuple[bool, dict[int, tuple[int, int]], int]]:
        step = localize(step_plan, topology, world.global_rank)
        groups = form_groups(topology, world, ScheduleGuard())
        store = filled_store(topology, batch, found, step.dcp_rank)
        backend = create_backend("reference")
        resources = AttentionResources(topology, store, groups, backend, step.tp_rank)
        tables = [request.block_tables[0] for request in batch.requests]
        out = []
        for rows in create_sparse_rows(step, resources):
            placed: dict[int, tuple[int, int]] = {}
            for sequence in rows.choice.sequences:
                request = tables.index(tuple(sequence.block_table.tolist()))
                for row, position in zip(sequence.rows, sequence.positions, strict=True):
                    assert int(row) not in placed
                    placed[int(row)] = (request, int(position))
            out.append((rows.placement.is_copy, placed, rows.placement.gathered_rows))
        return out

    classes = ThreadGroup(topology.mesh.world_size).run(body)
    layout, count = step_plan.rows, step_plan.rows.num_local_rows
    for rank, found_classes in enumerate(classes):
        coord = topology.mesh.coord_of(rank)
        group = sorted({topology.mesh.coord_of(r).pcp for r in dcp_group(topology, rank)})
        assert [is_copy for is_copy, _, _ in found_classes] == [True, False]
        for is_copy, placed, num_gathered in found_classes:
            first = 0 if is_copy else layout.num_copy
            end = layout.num_copy if is_copy else count
            expected = {}
            for block, pcp in enumerate([coord.pcp] if is_copy else group):
                for local in range(first, end):
                    if layout.valid[pcp * count + local]:
                        row = int(layout.gather[pcp * count + local])
                        expected[block * (end - first) + local - first] = whereabouts(batch, row)
            assert placed == expected
            assert num_gathered == (end - first) * (1 if is_copy else len(group))


def dcp_group(topology, rank):  # type: ignore[no-untyped-def]
    """Members of a rank's DCP group."""
    return next(members for members in topology.mesh.groups("dcp") if rank in members)


def whereabouts(batch, row):  # type: ignore[no-untyped-def]
    """(request, position) of a global row."""
    for index, request in enumerate(batch.requests):
        if row < len(request.token_ids):
            return index, request.num_computed_tokens + row
        row -= len(request.token_ids)
    raise AssertionError(row)
