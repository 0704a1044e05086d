from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.attention.backends import reference as module
from heddle.attention.backends.base import KeyRange
from heddle.attention.backends.reference import ReferenceBackend, tree_sum
from heddle.layout.heads import HeadRun
from tests.attention.backends.inputs import HEAD_MAPS, make_inputs


def test_two_keys_by_hand():
    # Scores ln 1 and ln 3 weigh 1 : 3, so (2 + 18) / 4 = 5 and ln 4. Lane 1 is a pad.
    query = torch.tensor([[[1.0], [7.0]], [[1.0], [7.0]]])
    key = torch.tensor([[[0.0]], [[math.log(3)]]])
    value = torch.tensor([[[2.0]], [[6.0]]])
    state = ReferenceBackend().attend(
        query, key, value, [HeadRun(0, 0, 1)], np.array([2, 1]), scale=1.0
    )
    torch.testing.assert_close(state.out[..., 0], torch.tensor([[5.0, 0.0], [2.0, 0.0]]))
    expected = torch.tensor([[math.log(4), -math.inf], [0.0, -math.inf]])
    torch.testing.assert_close(state.lse, expected)


def test_sums_are_at_least_float32():
    half = torch.ones(1, 1, 4, dtype=torch.bfloat16)
    state = ReferenceBackend().attend(half, half, half, [HeadRun(0, 0, 1)], 1, 1.0)
    assert state.out.dtype == torch.float32
    wide = half.double()
    state = ReferenceBackend().attend(wide, half, half, [HeadRun(0, 0, 1)], 1, 1.0)
    assert state.out.dtype == torch.float64


def bits(tensor):
    return tensor.contiguous().view(torch.int64 if tensor.dtype == torch.float64 else torch.int32)


def same_bits(one, other):
    return torch.equal(bits(one.out), bits(other.out)) and torch.equal(
        bits(one.lse), bits(other.lse)
    )


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def attend_alone(inputs, row, lane, first, end, softcap):
    """One row and lane over copies of its own keys, in one call with nothing else."""
    head = inputs.lanes[lane]
    return ReferenceBackend().attend(
        inputs.query[row : row + 1, lane : lane + 1].clone(),
        inputs.key[first:end, head : head + 1].clone(),
        inputs.value[first:end, head : head + 1].clone(),
        [HeadRun(0, 0, 1)],
        end - first,
        0.3,
        softcap,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@given(
    bounds=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), min_size=1, max_size=40),
    head_map=st.sampled_from(list(HEAD_MAPS)),
    widths=st.sampled_from([(16, 16), (7, 4), (3, 5)]),
    softcap=st.sampled_from([0.0, 1.5]),
    seed=st.integers(0, 99),
)
def test_bits_of_a_row_and_lane_depend_on_nothing_beside_them(
    dtype, bounds, head_map, widths, softcap, seed
):
    first, end = np.array(bounds, dtype=np.int64).T
    inputs = make_inputs(head_map, len(bounds), 71, widths, dtype, seed=seed)
    together = ReferenceBackend().attend(
        inputs.query, inputs.key, inputs.value, inputs.runs, KeyRange(first, end), 0.3, softcap
    )
    for row in range(0, len(bounds), 5):
        for lane in range(0, 9, 4):
            if inputs.lanes[lane] is None or first[row] >= end[row]:
                continue
            alone = attend_alone(inputs, row, lane, int(first[row]), int(end[row]), softcap)
            assert torch.equal(bits(alone.out[0, 0]), bits(together.out[row, lane]))
            assert torch.equal(bits(alone.lse[0, 0]), bits(together.lse[row, lane]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bits_do_not_depend_on_threads_or_blocks(threads, dtype, monkeypatch):
    inputs = make_inputs("9q3kv", 4, 3000, (16, 16), dtype)
    visible = np.arange(2997, 3001)
    whole = ReferenceBackend().attend(
        inputs.query, inputs.key, inputs.value, inputs.runs, visible, 0.3
    )
    for row in (0, 3):
        for lane in (0, 8):
            alone = attend_alone(inputs, row, lane, 0, int(visible[row]), 0.0)
            assert torch.equal(bits(alone.out[0, 0]), bits(whole.out[row, lane]))
            assert torch.equal(bits(alone.lse[0, 0]), bits(whole.lse[row, lane]))
    torch.set_num_threads(3 - threads)
    monkeypatch.setattr(module, "MAX_TERMS", 100_000)
    again = ReferenceBackend().attend(
        inputs.query, inputs.key, inputs.value, inputs.runs, visible, 0.3
    )
    assert same_bits(whole, again)


def test_keys_out_of_range_leave_no_trace():
    inputs = make_inputs("9q3kv", 2, 20, dtype=torch.float32)
    visible = KeyRange(np.array([3, 5]), np.array([6, 11]))
    states = []
    for poison in (0.0, math.nan, math.inf):
        key, value = inputs.key.clone(), inputs.value.clone()
        key[6:] = poison  # row 1 sees some of it, row 0 none
        value[6:] = poison
        states.append(ReferenceBackend().attend(inputs.query, key, value, inputs.runs, visible, 1))
    assert not torch.equal(states[0].out[1], states[2].out[1])
    for state in states[1:]:
        assert torch.equal(bits(state.out[0]), bits(states[0].out[0]))
        assert torch.equal(bits(state.lse[0]), bits(states[0].lse[0]))


@given(
    terms=st.lists(
        st.floats(-1e6, 1e6, width=32) | st.sampled_from([0.0, -0.0]), min_size=1, max_size=40
    ),
    pads=st.integers(0, 40),
)
@settings(max_examples=50)
def test_zeros_on_the_right_change_no_bit_of_a_tree_sum(terms, pads):
    alone = tree_sum(torch.tensor(terms)[None])
    padded = tree_sum(torch.tensor(terms + [0.0] * pads)[None])
    assert torch.equal(bits(alone), bits(padded))
    torch.testing.assert_close(
        alone.double(), torch.tensor([math.fsum(terms)], dtype=torch.float64), rtol=0, atol=4.0
    )


def test_a_tree_sum_adds_neighbours():
    # In order from the left, 1 would be lost in 2^24 twice.
    terms = torch.tensor([[2.0**24, 0.0, 1.0, 1.0]])
    assert tree_sum(terms).item() == 2**24 + 2
