"""Rows are handed to those who store or see them, and to no others."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.config.visibility import FULL, Visibility
from heddle.layout.rows import RowClass
from heddle.step.new_rows import Halo, place_of, worthwhile_halo
from heddle.step.plan import plan
from heddle.step.topology import Topology
from tests.support.batches import RULES, make_batch, make_topology, request_lengths, whole_in_turn
from tests.support.visible import seen_by

WINDOWED = [rule for rule in RULES if not rule.is_full]
CUT = [(1, 2, 2), (2, 2, 4), (1, 4, 2), (1, 4, 4), (2, 4, 8)]


@given(st.sampled_from(CUT), st.sampled_from(WINDOWED), st.sampled_from([1, 2, 4]), request_lengths)
@settings(max_examples=80)
def test_a_rank_gets_what_it_stores_or_sees(
    sizes: tuple[int, int, int],
    rule: Visibility,
    interleave: int,
    lengths: list[tuple[int, int]],
) -> None:
    topology = make_topology(sizes, interleave=interleave, rule=rule, row_policy=whole_in_turn)
    batch = make_batch(topology, lengths)
    rows = plan(batch, topology).rows
    halo = Halo.of(batch, rows, topology, 0)
    ranks = topology.groups[0].world_size
    home = home_of(topology, rows)
    most = 0
    for tp_rank in range(topology.mesh.slice_size):
        for target in range(sizes[1]):
            place = place_of(topology, target, tp_rank) if ranks > 1 else 0
            for source in range(sizes[1]):
                expected = set()
                for index, request in enumerate(batch.requests):
                    first, cached = int(rows.request_starts[index]), request.num_computed_tokens
                    if rows.classes[index] is RowClass.COPY:
                        continue
                    count = len(request.token_ids)
                    seen = {
                        t
                        for row in range(count)
                        if home[first + row] == target
                        for t in seen_by(rule, cached + row)
                    }
                    stored = {t for t in range(cached + count) if t // interleave % ranks == place}
                    expected |= {
                        first + t - cached
                        for t in seen | stored
                        if t >= cached and home[first + t - cached] == source
                    }
                assert set(halo.handed_over(source, target, place).tolist()) == expected
                most = max(most, len(expected) if source != target else 0)
    if ranks > 1:
        assert halo.largest(topology) == most
        found = worthwhile_halo(batch, rows, topology, 0)
        assert (found and found[1]) == (most if most < rows.num_distributed else None)
    else:
        assert worthwhile_halo(batch, rows, topology, 0) is None


def home_of(topology: Topology, rows) -> dict[int, int]:  # type: ignore[no-untyped-def]
    """PCP rank of each distributed row, from the arrays that ranks go by."""
    found = {}
    per_rank = rows.num_local_rows
    for rank in range(topology.mesh.pcp_size):
        for j in range(rank * per_rank + rows.num_copy, (rank + 1) * per_rank):
            if rows.valid[j]:
                found[int(rows.gather[j])] = rank
    return found


def test_full_attention_gathers() -> None:
    topology = make_topology((1, 4, 4), rule=FULL)
    batch = make_batch(topology, [(0, 64)])
    assert worthwhile_halo(batch, plan(batch, topology).rows, topology, 0) is None


def test_places_are_those_of_the_mesh() -> None:
    for sizes in CUT:
        mesh = make_topology(sizes).mesh
        for rank in range(mesh.world_size):
            coord = mesh.coord_of(rank)
            place = place_of(make_topology(sizes), coord.pcp, coord.tp)
            assert place == mesh.position("dcp", rank)


def test_a_long_prompt_under_a_window_takes_the_halo_and_says_so() -> None:
    topology = make_topology((1, 4, 4), rule=Visibility("window", 32))
    batch = make_batch(topology, [(0, 512)])
    step_plan = plan(batch, topology)
    assert step_plan.groups[0].new_rows == "halo"
    assert step_plan.groups[0].halo_rows < step_plan.rows.num_distributed
    reason = f"group 0, new rows: halo, {step_plan.groups[0].halo_rows} of 128 rows a rank"
    assert reason in step_plan.reasons
