"""Block tables survive their journey, whole and in parts."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from heddle.step.batch import GlobalBatch
from heddle.step.packed import pack_table, packed_length, packed_part, unpack_table
from tests.support.batches import make_batch, make_topology

tables = st.lists(st.integers(0, 2**31 - 1), max_size=12)


@given(tables, st.integers(0, 12), st.one_of(st.none(), st.integers(0, 12)))
def test_a_part_of_a_packed_table_is_the_part_of_the_table(
    table: list[int], start: int, end: int | None
) -> None:
    packed = pack_table(table)
    assert unpack_table(packed).tolist() == table
    assert packed_length(packed) == len(table)
    assert unpack_table(packed_part(packed, start, end)).tolist() == table[start:end]


def test_a_request_reads_its_tables_after_a_message() -> None:
    topology = make_topology((1, 1, 1))
    batch = make_batch(topology, [(9, 1), (0, 1)])
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=GlobalBatch)
    assert [request.block_tables for request in copy.requests] == [((3, 2, 1),), ((5,),)]
    assert [request.table(0).tolist() for request in copy.requests] == [[3, 2, 1], [5]]
