from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.planner.trace import HASHED_TOKENS, TracedRequest
from heddle.simulator.tokens import Names, RunTokens

runs = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=6)


@given(runs, st.lists(st.integers(0, 4)), st.data())
def test_runs_read_and_grow_like_a_list(
    wanted: list[tuple[int, int]], growth: list[int], data: st.DataObject
) -> None:
    tokens = RunTokens(wanted, answer=4)
    plain = [token for token, count in wanted for _ in range(count)]
    for step in growth:
        if step == 4:
            tokens.extend(3)
            plain += [4, 4, 4]
        else:
            tokens.append(step)
            plain.append(step)
    assert (len(tokens), list(tokens)) == (len(plain), plain)
    start, end = (data.draw(st.integers(0, len(plain) + 3)) for _ in range(2))
    assert tokens[start:end] == tuple(plain[start:end])
    if plain:
        place = data.draw(st.integers(-len(plain), len(plain) - 1))
        assert tokens[place] == plain[place]


def test_a_place_beyond_the_end_is_refused() -> None:
    with pytest.raises(IndexError, match="token 2 of 2"):
        RunTokens([(1, 2)], answer=0)[2]


def shared(left: RunTokens, right: RunTokens) -> int:
    """Leading tokens that are equal."""
    pairs = zip(left, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def test_prompts_share_as_many_tokens_as_their_hashes() -> None:
    names = Names()
    first = names.stand_ins(TracedRequest(1500, 1, (7, 8, 9)), 0)
    second = names.stand_ins(TracedRequest(1600, 1, (7, 8, 5, 6)), 1)
    third = names.stand_ins(TracedRequest(700, 1, (7, 8)), 2)
    alone = names.stand_ins(TracedRequest(700, 1), 3)
    assert [len(each) for each in (first, second, third, alone)] == [1500, 1600, 700, 700]
    assert shared(first, second) == 2 * HASHED_TOKENS
    assert shared(first, third) == 700
    assert shared(first, alone) == 0


def test_answers_and_the_rest_of_a_prompt_are_nobody_elses() -> None:
    names = Names(4)
    first, second = (names.stand_ins(TracedRequest(10, 1, (3, 1)), at) for at in range(2))
    assert first[:8] == second[:8]
    ids = {first[8], first.answer, second[8], second.answer}
    assert len(ids) == 4
    assert not ids & set(first[:8])
    assert max(ids) < 2**64


prompts = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 7)), min_size=1, max_size=5)


@given(prompts, prompts, st.integers(1, 6))
def test_blocks_have_one_name_exactly_where_all_before_their_end_is_equal(
    left: list[tuple[int, int]], right: list[tuple[int, int]], unit: int
) -> None:
    places: dict[tuple[int, int, int], int] = {}
    first, second = (RunTokens(runs, answer=9, places=places) for runs in (left, right))
    names = [each.block_names(unit) for each in (first, second)]
    assert [len(each) for each in names] == [len(first) // unit, len(second) // unit]
    for at, (a, b) in enumerate(zip(*names, strict=False)):
        end = (at + 1) * unit
        assert (a == b) == (first[:end] == second[:end])
    first.extend(5 * unit)
    assert first.block_names(unit) == names[0]
