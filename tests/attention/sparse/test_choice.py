"""Keys of a sequence on one rank, and a choice that holds whatever is kept at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heddle.attention.row_codec import PlainRows
from heddle.attention.sparse import choice, rows
from heddle.attention.sparse.choice import LocalSequence, RequestRows
from heddle.attention.storage import KVStore
from heddle.layout.kv import KVLayout
from tests.attention.sparse.bench import chosen_keys, draw_sequences, run_ranks, sparse_topology
from tests.support.batches import make_batch


@given(st.sampled_from([(1, 1), (2, 2), (3, 1), (3, 4)]), st.integers(0, 40), st.data())
def test_a_rank_knows_the_positions_and_slots_of_its_keys(
    sizes: tuple[int, int], last: int, data: st.DataObject
) -> None:
    """Positions and slots are counted here one by one, round after round."""
    ranks, run = sizes
    start = data.draw(st.integers(0, ranks - 1))
    rank = data.draw(st.integers(0, ranks - 1))
    table = np.array([5, 2, 9, 7, 1, 3, 8, 4, 6, 10, 11], dtype=np.int64)
    store = KVStore(
        tensor_of_layer={0: 0},
        num_blocks=12,
        block_size=4,
        num_heads=1,
        codec=PlainRows(1, torch.float64),
        device=torch.device("cpu"),
    )
    store.layer(0)[:, 0, 0] = torch.arange(48)  # every slot holds its own number
    held = [t for t in range(last + 1) if (t // run + start) % ranks == rank]
    slots = [int(table[i // 4]) * 4 + i % 4 for i in range(len(held))]
    positions = np.array([last, last // 2], dtype=np.int64)
    request = RequestRows(
        rows=np.array([1, 0]),
        positions=positions,
        block_table=table,
        layout=KVLayout(ranks, run, 4, start),
    )
    found = LocalSequence(request, store, rank)
    assert found.ids.dtype == torch.int32
    assert found.ids.tolist() == held
    assert store.read(0, found.keys)[:, 0, 0].tolist() == slots
    assert found.visible.tolist() == [sum(t <= p for t in held) for p in positions]
    owned = dict(zip(held, slots, strict=True))
    assert found.slots.tolist() == [owned.get(t, -1) for t in range(last + 1)]


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 4)], ids=str)
def test_small_pieces_give_the_same_bits(
    sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = sparse_topology(sizes)
    batch = make_batch(topology, [(37, 1), (0, 19), (21, 5)])
    found = draw_sequences(batch, has_ties=False)
    whole = run_ranks(topology, batch, found)
    monkeypatch.setattr(choice, "rows_at_once", lambda heads, keys: 2)
    monkeypatch.setattr(rows, "_HELD_ELEMENTS", 1)
    for before, after in zip(whole, run_ranks(topology, batch, found), strict=True):
        assert after.chosen == before.chosen
        assert (after.out - before.out).abs().max() <= 1e-13
    for (request, row), keys in whole[0].chosen.items():
        assert keys == chosen_keys(found, request, row, 8)
