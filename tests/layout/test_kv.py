"""Laws O1 to O8: who stores a token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.errors import ConfigError
from heddle.layout.kv import KVLayout


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    world_size = draw(st.sampled_from([1, 2, 3, 4, 5, 8]))
    interleave = draw(st.integers(1, 5))
    return KVLayout(
        world_size=world_size,
        interleave_size=interleave,
        block_size=interleave * draw(st.integers(1, 4)),
        start_rank=draw(st.integers(0, world_size - 1)),
    )


lengths = st.one_of(st.just(0), st.integers(0, 200))


def dealt(layout: KVLayout, length: int) -> list[list[int]]:
    """Positions per rank, by dealing runs like cards; the oracle of this file."""
    hands: list[list[int]] = [[] for _ in range(layout.world_size)]
    rank = layout.start_rank
    for start in range(0, length, layout.interleave_size):
        hands[rank].extend(range(start, min(start + layout.interleave_size, length)))
        rank = (rank + 1) % layout.world_size
    return hands


@given(layouts(), lengths)
def test_each_token_has_one_owner_and_place(layout: KVLayout, length: int) -> None:
    hands = dealt(layout, length)
    for rank, hand in enumerate(hands):
        for index, position in enumerate(hand):
            assert layout.owner(position) == rank
            assert layout.local_index(position) == index
            assert layout.global_position(index, rank) == position


@given(layouts(), lengths)
def test_local_lengths_count_tokens(layout: KVLayout, length: int) -> None:
    counts = [layout.local_len(length, rank) for rank in range(layout.world_size)]
    assert counts == [len(hand) for hand in dealt(layout, length)]
    assert sum(counts) == length
    assert max(counts) - min(counts) <= layout.interleave_size
    assert max(counts) == counts[layout.start_rank] == layout.max_local_len(length)
    round_size = layout.world_size * layout.interleave_size
    assert max(counts) <= -(-length // round_size) * layout.interleave_size


@given(layouts(), st.lists(st.tuples(lengths, lengths), max_size=6))
def test_a_range_is_held_by_those_who_store_a_key_of_it(
    layout: KVLayout, ranges: list[tuple[int, int]]
) -> None:
    first = np.array([a for a, _ in ranges], dtype=np.int64)
    end = np.array([b for _, b in ranges], dtype=np.int64)
    found = layout.holders(first, end)
    assert found.shape == (layout.world_size, len(ranges))
    for rank in range(layout.world_size):
        expected = [any(layout.owner(t) == rank for t in range(a, b)) for a, b in ranges]
        assert found[rank].tolist() == expected


@given(layouts(), st.lists(lengths, max_size=5))
def test_lengths_of_all_ranks_are_those_of_each(layout: KVLayout, several: list[int]) -> None:
    found = layout.local_lens(np.array(several, dtype=np.int64))
    assert found.shape == (len(several), layout.world_size)
    for row, length in zip(found.tolist(), several, strict=True):
        assert row == [len(hand) for hand in dealt(layout, length)]


@given(layouts(), lengths)
def test_one_more_token_changes_one_rank(layout: KVLayout, length: int) -> None:
    grown = [
        layout.local_len(length + 1, rank) - layout.local_len(length, rank)
        for rank in range(layout.world_size)
    ]
    expected = [0] * layout.world_size
    expected[layout.owner(length)] = 1
    assert grown == expected


@given(layouts(), lengths, lengths)
def test_an_interval_is_owned_as_an_interval(layout: KVLayout, one: int, other: int) -> None:
    start, end = sorted((one, other))
    for rank, hand in enumerate(dealt(layout, end)):
        first, last = layout.local_range(start, end, rank)
        assert hand[first:last] == [position for position in hand if position >= start]
        assert last == len(hand)


@given(layouts(), st.lists(st.integers(0, 150), min_size=1, max_size=12))
def test_visible_length_counts_owned_keys_up_to_the_query(
    layout: KVLayout, queries: list[int]
) -> None:
    hands = dealt(layout, max(queries) + 1)
    for rank in range(layout.world_size):
        expected = [sum(key <= query for key in hands[rank]) for query in queries]
        assert [layout.visible_len(query, rank) for query in queries] == expected
        assert layout.visible_len(np.array(queries), rank).tolist() == expected


def test_offset_ownership_equals_position_ownership_iff_interleave_divides_block() -> None:
    compared = 0
    for world_size in (2, 3, 4):
        for block_size in range(1, 9):
            for interleave in range(1, 10):
                span = block_size * world_size
                agree = all(
                    (t % span // interleave) % world_size == (t // interleave) % world_size
                    for t in range(4 * span * interleave)
                )
                legal = block_size % interleave == 0
                assert agree == legal
                if legal:
                    KVLayout(world_size, interleave, block_size)
                else:
                    with pytest.raises(ConfigError, match="must divide block_size"):
                        KVLayout(world_size, interleave, block_size)
                compared += 1
    assert compared == 3 * 8 * 9


@given(layouts(), st.integers(1, 4), st.randoms())
def test_full_blocks_fill_every_slot_of_every_rank_once(
    layout: KVLayout, num_blocks: int, random: st.DataObject
) -> None:
    table = list(range(10))
    random.shuffle(table)  # type: ignore[attr-defined]
    table = table[:num_blocks]
    length = num_blocks * layout.virtual_block_size
    for rank in range(layout.world_size):
        slots = layout.slots(np.arange(length), table, rank)
        hits = sorted(slots[slots >= 0].tolist())
        expected = sorted(
            block * layout.block_size + place
            for block in table
            for place in range(layout.block_size)
        )
        assert hits == expected


@given(layouts(), st.integers(1, 120), st.data())
def test_slots_are_the_page_and_the_place_of_the_local_index(
    layout: KVLayout, length: int, data: st.DataObject
) -> None:
    num_blocks = layout.num_virtual_blocks(length)
    table = data.draw(st.permutations(range(3, 3 + num_blocks)))
    for rank, hand in enumerate(dealt(layout, length)):
        expected = [-1] * length
        for index, position in enumerate(hand):
            page = table[position // layout.virtual_block_size]
            expected[position] = page * layout.block_size + index % layout.block_size
        assert layout.slots(np.arange(length), table, rank).tolist() == expected
        assert [layout.slot(t, table, rank) for t in range(length)] == expected


@given(layouts(), st.integers(0, 60), st.integers(0, 60))
def test_slots_built_in_pieces_equal_slots_built_at_once(
    layout: KVLayout, first: int, second: int
) -> None:
    length = first + second
    table = np.arange(5, 5 + layout.num_virtual_blocks(length), dtype=np.int32)
    for rank in range(layout.world_size):
        whole = layout.slots(np.arange(length), table, rank)
        pieces = [
            layout.slots(np.arange(first), table, rank),
            layout.slots(np.arange(first, length), table, rank),
        ]
        assert np.concatenate(pieces).tolist() == whole.tolist()


@given(layouts(), lengths)
def test_arrays_agree_with_ints(layout: KVLayout, length: int) -> None:
    values = np.arange(length, dtype=np.int32)
    listed = range(length)
    assert layout.owner(values).tolist() == [layout.owner(t) for t in listed]
    assert layout.local_index(values).tolist() == [layout.local_index(t) for t in listed]
    for rank in range(layout.world_size):
        expected = [layout.local_len(t, rank) for t in listed]
        assert layout.local_len(values, rank).tolist() == expected
        positions = layout.global_position(values, rank)
        assert positions.dtype == np.int64
        assert positions.tolist() == [layout.global_position(t, rank) for t in listed]


@given(layouts())
def test_nothing_stored_for_length_zero(layout: KVLayout) -> None:
    for rank in range(layout.world_size):
        assert layout.local_len(0, rank) == 0
        assert layout.slots(np.zeros(0, dtype=np.int64), [], rank).tolist() == []
    assert layout.num_virtual_blocks(0) == 0
    assert layout.max_local_len(0) == 0


@given(layouts(), st.integers(1, 200))
def test_blocks_are_the_ceiling(layout: KVLayout, length: int) -> None:
    blocks = layout.num_virtual_blocks(length)
    assert (blocks - 1) * layout.virtual_block_size < length <= blocks * layout.virtual_block_size


def test_owner_and_index_table() -> None:
    layout = KVLayout(world_size=3, interleave_size=2, block_size=4)
    assert [layout.owner(t) for t in range(14)] == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2, 0, 0]
    assert [layout.local_index(t) for t in range(14)] == [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 4, 5]
    assert [[layout.global_position(i, rank) for i in range(6)] for rank in range(3)] == [
        [0, 1, 6, 7, 12, 13],
        [2, 3, 8, 9, 14, 15],
        [4, 5, 10, 11, 16, 17],
    ]


@pytest.mark.parametrize(
    ("start_rank", "expected"),
    [
        (
            0,
            {0: "000", 1: "100", 3: "210", 5: "221", 6: "222", 7: "322", 9: "432", 11: "443"}
            | {12: "444", 13: "544"},
        ),
        (
            1,
            {0: "000", 1: "010", 3: "021", 5: "122", 6: "222", 7: "232", 9: "243", 11: "344"}
            | {12: "444", 13: "454"},
        ),
    ],
)
def test_local_length_table(start_rank: int, expected: dict[int, str]) -> None:
    layout = KVLayout(3, 2, 4, start_rank)
    for length, digits in expected.items():
        assert [layout.local_len(length, rank) for rank in range(3)] == [int(d) for d in digits]


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (1, [1, 0, 0, 0]),
        (7, [2, 2, 2, 1]),
        (9, [3, 2, 2, 2]),
        (15, [4, 4, 4, 3]),
        (17, [5, 4, 4, 4]),
    ],
)
def test_four_rank_table(length: int, expected: list[int]) -> None:
    layout = KVLayout(4, 2, 2)
    assert [layout.local_len(length, rank) for rank in range(4)] == expected


def test_slot_table() -> None:
    layout = KVLayout(world_size=3, interleave_size=2, block_size=4)
    assert layout.virtual_block_size == 12
    none = -1
    assert [layout.slots(np.arange(14), [5, 2], rank).tolist() for rank in range(3)] == [
        [20, 21, *[none] * 4, 22, 23, *[none] * 4, 8, 9],
        [none, none, 20, 21, *[none] * 4, 22, 23, *[none] * 4],
        [*[none] * 4, 20, 21, *[none] * 4, 22, 23, none, none],
    ]


@pytest.mark.parametrize(
    ("world_size", "rank", "bounds", "localised"),
    [(2, 0, [5, 6, 7], [3, 4, 4]), (3, 2, [13, 14, 15, 16], [4, 4, 4, 4])],
)
def test_visible_length_is_localised_per_row(
    world_size: int, rank: int, bounds: list[int], localised: list[int]
) -> None:
    layout = KVLayout(world_size, 2, 4)
    assert layout.visible_len(np.array(bounds) - 1, rank).tolist() == localised


def test_long_positions_do_not_wrap() -> None:
    layout = KVLayout(2, 1, 2**20)
    table = np.zeros(1025, dtype=np.int32)
    table[-1] = 2**31 - 1
    position = np.array([2**31], dtype=np.int64)
    assert layout.slots(position, table, rank=0).tolist() == [(2**31 - 1) * 2**20]
    narrow = np.array([2**31 - 1], dtype=np.int32)
    assert layout.visible_len(narrow, rank=1).tolist() == [2**30]


def test_fingerprint_names_every_field() -> None:
    base = KVLayout(4, 2, 4, 1)
    others = [
        KVLayout(2, 2, 4, 1),
        KVLayout(4, 1, 4, 1),
        KVLayout(4, 2, 8, 1),
        KVLayout(4, 2, 4, 2),
    ]
    prints = {layout.fingerprint(2, "float32") for layout in (base, *others)}
    prints |= {base.fingerprint(1, "float32"), base.fingerprint(2, "float64")}
    assert len(prints) == 7
    assert base.fingerprint(2, "float32") == KVLayout(4, 2, 4, 1).fingerprint(2, "float32")
    assert all(0 <= value < 2**64 for value in prints)


def test_misuse_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="interleave_size=3; must divide block_size=16"):
        KVLayout(2, 3, 16)
    with pytest.raises(ConfigError, match=r"start_rank=2; must be in \[0, 2\)"):
        KVLayout(2, 1, 16, 2)
    with pytest.raises(ConfigError, match="world_size=0; must be at least 1"):
        KVLayout(0, 1, 16)
    layout = KVLayout(2, 1, 16)
    with pytest.raises(ValueError, match=r"rank=2; must be in \[0, 2\)"):
        layout.local_len(3, 2)
    with pytest.raises(ValueError, match="length=-1; must be at least 0"):
        layout.local_len(-1, 0)
    with pytest.raises(ValueError, match="position=-2; must be at least 0"):
        layout.owner(np.array([1, -2]))
    with pytest.raises(ValueError, match="end=2; must be at least start=3"):
        layout.local_range(3, 2, 0)
    with pytest.raises(TypeError, match="position has dtype float64; must be integers"):
        layout.owner(np.array([1.0]))  # type: ignore[call-overload]
    for rank in range(2):  # too short a table is seen by every rank, not by the owner alone
        with pytest.raises(IndexError):
            layout.slots(np.array([32]), [7], rank)
