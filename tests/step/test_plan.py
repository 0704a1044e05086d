"""Equal batches, equal plans; another batch or another layout, another answer."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.config.model import LayerKind
from heddle.config.visibility import FULL, Visibility
from heddle.errors import LayoutMismatch
from heddle.layout.rows import RowClass, RowRequest
from heddle.step.batch import GlobalBatch, SampleSpec
from heddle.step.coverage import expected_coverage
from heddle.step.draw_params import DrawParams
from heddle.step.packed import pack_table
from heddle.step.placement import Placed
from heddle.step.plan import plan
from heddle.step.topology import Topology
from tests.support.batches import by_length, make_batch, make_topology, request_lengths, topologies

WINDOW = Visibility("window", 32)


@given(topologies(), request_lengths)
def test_a_decoded_batch_gives_the_same_digest(
    topology: Topology, lengths: list[tuple[int, int]]
) -> None:
    batch = make_batch(topology, lengths)
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=GlobalBatch)
    assert plan(copy, topology).digest == plan(batch, topology).digest


MASKED = SampleSpec(params=DrawParams(), seed=0, choice=0, position=0, grammar_mask=bytes([1] * 8))
"""A row that draws under a grammar."""


@given(topologies(), request_lengths, st.data())
def test_any_change_of_the_batch_changes_the_digest(
    topology: Topology, lengths: list[tuple[int, int]], data: st.DataObject
) -> None:
    batch = make_batch(topology, lengths)
    index = data.draw(st.integers(0, len(batch.requests) - 1))
    request = batch.requests[index]
    changed = data.draw(
        st.sampled_from(
            [
                msgspec.structs.replace(request, request_id=request.request_id + 50),
                msgspec.structs.replace(
                    request, token_ids=(request.token_ids[0] + 1, *request.token_ids[1:])
                ),
                msgspec.structs.replace(
                    request, packed_tables=(request.packed_tables[0] + pack_table([99]),)
                ),
                msgspec.structs.replace(request, samples=(MASKED,)),
            ]
        )
    )
    requests = (*batch.requests[:index], changed, *batch.requests[index + 1 :])
    other = msgspec.structs.replace(batch, requests=requests)
    assert plan(other, topology).digest != plan(batch, topology).digest
    later = msgspec.structs.replace(batch, step=batch.step + 1)
    assert plan(later, topology).digest != plan(batch, topology).digest


def test_the_digest_tells_row_classes_apart_even_where_rows_lie_alike() -> None:
    """On one PCP rank a copied, a whole and a split request have the same index arrays."""
    digests = set()
    for row_class in RowClass:
        topology = dataclasses.replace(
            make_topology((2, 1, 2)),
            row_policy=lambda requests, _, chosen=row_class: Placed(
                tuple(RowRequest(len(r.token_ids), chosen) for r in requests), ()
            ),
        )
        step_plan = plan(make_batch(topology, [(0, 5)]), topology)
        assert step_plan.rows.gather.tolist() == list(range(5))
        digests.add(step_plan.digest)
    assert len(digests) == len(RowClass) == 3


@pytest.mark.parametrize(
    "change",
    [{"block_size": 8}, {"interleave_size": 4}, {"kv_cache_dtype": "float64"}],
    ids=["block size", "interleave", "kv dtype"],
)
def test_a_sequence_of_another_layout_raises(change: dict[str, object]) -> None:
    topology = make_topology((1, 2, 2), block_size=4)
    batch = make_batch(topology, [(5, 1)])
    other = dataclasses.replace(topology, **change)
    with pytest.raises(LayoutMismatch, match="request 100 carries KV layout fingerprint"):
        plan(batch, other)


def test_a_sequence_of_another_degree_raises() -> None:
    batch = make_batch(make_topology((1, 2, 2)), [(5, 1)])
    with pytest.raises(LayoutMismatch):
        plan(batch, make_topology((1, 4, 4)))


def test_context_is_skipped_only_if_no_request_has_any() -> None:
    topology = make_topology((1, 2, 2), row_policy=by_length)

    def contexts(lengths: list[tuple[int, int]]) -> dict[RowClass, str]:
        (group,) = plan(make_batch(topology, lengths), topology).groups
        return {row_class: part.context for row_class, part in group.classes.items()}

    assert contexts([(0, 9), (0, 8)])[RowClass.SPLIT] == "none"
    assert contexts([(0, 9), (1, 8)])[RowClass.SPLIT] == "gather_kv"
    assert contexts([(0, 9), (50, 1)]) == {
        RowClass.COPY: "gather_q",
        RowClass.WHOLE: "none",
        RowClass.SPLIT: "none",
    }


def test_keys_that_a_window_hides_are_not_met() -> None:
    """Of 100 cached tokens a window of 16 sees the last 15, from the start of their round on."""
    topology = make_topology(
        (1, 2, 2), rule=Visibility("window", 16), workspace=200, row_policy=by_length
    )
    (group,) = plan(make_batch(topology, [(100, 9)]), topology).groups
    (chunk,) = group.classes[RowClass.SPLIT].chunks
    assert [(piece.start, piece.end) for piece in chunk.pieces] == [(84, 100)]
    aligned = make_topology(
        (1, 2, 2), rule=Visibility("chunk", 50), workspace=200, row_policy=by_length
    )
    (group,) = plan(make_batch(aligned, [(100, 9)]), aligned).groups
    assert group.classes[RowClass.SPLIT].context == "none"


def test_an_idle_replica_has_an_empty_plan() -> None:
    topology = make_topology((2, 2, 4))
    batch = GlobalBatch(epoch=0, step=3, requests=())
    step_plan = plan(batch, topology)
    assert step_plan.rows.num_local_rows == step_plan.logits.num_rows == 0
    assert expected_coverage(batch, topology) == (0,)


def test_groups_that_choose_alike_say_so_once() -> None:
    kinds = [LayerKind(visibility=rule) for rule in (FULL, WINDOW, WINDOW, WINDOW)]
    topology = make_topology(
        (1, 2, 2), num_layers=4, layer_kinds=tuple(kinds), row_policy=by_length
    )
    step_plan = plan(make_batch(topology, [(60, 1)]), topology)
    assert len(step_plan.groups) == 4
    (reason,) = step_plan.reasons
    assert reason.startswith("groups 0, 1, 2, 3, copy rows: as asked: ag_rs ")
