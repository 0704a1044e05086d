"""What is written is read back, bit for bit, through any block table."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heddle.attention.row_codec import PlainRows
from heddle.attention.storage import KVStore, SlotWrite
from heddle.kvcache.copies import BlockCopy
from heddle.layout.kv import KVLayout
from heddle.step.views import LocalRange

BLOCK = 4


def make_store(num_blocks: int = 12) -> KVStore:
    return KVStore(
        tensor_of_layer={0: 0, 1: 1},
        num_blocks=num_blocks,
        block_size=BLOCK,
        num_heads=2,
        codec=PlainRows(3, torch.float32),
        device=torch.device("cpu"),
    )


@given(st.permutations(range(1, 12)), st.integers(0, 44), st.integers(0, 44))
def test_a_local_range_reads_the_rows_of_its_block_table(
    table: list[int], first: int, second: int
) -> None:
    store = make_store()
    rows = torch.arange(12 * BLOCK * 6, dtype=torch.float32).reshape(12 * BLOCK, 2, 3)
    store.tensors[1].copy_(rows)
    start, end = sorted((first, second))
    found = store.read(1, store.locate(LocalRange(np.array(table), start, end)))
    expected = [table[i // BLOCK] * BLOCK + i % BLOCK for i in range(start, end)]
    assert torch.equal(found, rows[expected])


@given(st.integers(1, 5), st.integers(0, 10), st.integers(0, 30))
def test_consecutive_blocks_read_as_a_view(first_block: int, start: int, length: int) -> None:
    store = make_store()
    table = np.arange(first_block, first_block + 6)
    keys = LocalRange(table, start, min(start + length, 6 * BLOCK))
    found = store.read(0, store.locate(keys))
    assert found.untyped_storage().data_ptr() == store.tensors[0].untyped_storage().data_ptr()
    assert len(found) == len(store.locate(keys)) == keys.end - keys.start


@given(st.lists(st.sampled_from([-1, 5, 9, 17, 30]), max_size=6, unique=True))
def test_only_rows_with_a_slot_are_written(slots: list[int]) -> None:
    store = make_store()
    store.tensors[0].fill_(-7)
    rows = torch.arange(len(slots) * 6, dtype=torch.float32).reshape(len(slots), 2, 3)
    store.write(0, SlotWrite.of(np.array(slots, dtype=np.int64), store.num_slots), rows)
    expected = torch.full((12 * BLOCK, 2, 3), -7.0)
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected[slot] = rows[row]
    assert torch.equal(store.tensors[0], expected)


@pytest.mark.parametrize("slots", [[0, 12 * BLOCK], [-2, 3]])
def test_a_slot_outside_the_pool_is_refused_before_anything_is_written(slots: list[int]) -> None:
    with pytest.raises(IndexError, match=rf"slots {min(slots)} to {max(slots)} are not in"):
        SlotWrite.of(np.array(slots), make_store().num_slots)


@given(st.integers(1, 4), st.sampled_from([1, 2, 4]), st.integers(0, 3), st.data())
def test_copy_on_write_copies_this_ranks_share_and_leaves_the_donor(
    ranks: int, interleave: int, block_number: int, data: st.DataObject
) -> None:
    layout = KVLayout(ranks, interleave, BLOCK)
    virtual = ranks * BLOCK
    start = block_number * virtual
    end = start + data.draw(st.integers(1, virtual))
    total = 0
    for rank in range(ranks):
        store = make_store()
        before = torch.randn(12 * BLOCK, 2, 3)
        store.tensors[0].copy_(before)
        store.tensors[1].copy_(before)
        copy = BlockCopy(source_block=3, target_block=7, start=start, end=end)
        store.copy_blocks([copy], [(layout, rank)])
        owned = sum((t // interleave) % ranks == rank for t in range(start, end))
        expected = before.clone()
        expected[7 * BLOCK : 7 * BLOCK + owned] = before[3 * BLOCK : 3 * BLOCK + owned]
        assert torch.equal(store.tensors[0], expected)
        assert torch.equal(store.tensors[1], expected)
        total += owned
    assert total == end - start


def test_wiped_blocks_hold_zeros_and_others_stay() -> None:
    store = make_store()
    for layer in store.tensors:
        layer.fill_(torch.nan)
    store.wipe([2, 5])
    for layer in store.tensors:
        finite = torch.isfinite(layer).reshape(12, -1).all(dim=1)
        assert torch.nonzero(finite).flatten().tolist() == [2, 5]


def test_layers_of_different_groups_share_a_tensor() -> None:
    store = KVStore(
        tensor_of_layer={4: 0, 7: 1, 5: 0},
        num_blocks=3,
        block_size=BLOCK,
        num_heads=1,
        codec=PlainRows(2, torch.float32),
        device=torch.device("cpu"),
    )
    assert len(store.tensors) == 2
    assert store.layer(4) is store.layer(5) is store.tensors[0]
    assert store.layer(7) is store.tensors[1]
