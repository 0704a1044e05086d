from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heddle.attention.state import (
    AttentionState,
    accumulation_dtype,
    concatenate,
    merge,
    weigh,
    weights,
)
from heddle.errors import NumericsError
from tests.support.oracle import dense_row

NAN, INF = math.nan, math.inf


def state(out, lse, dtype=torch.float64):
    return AttentionState(torch.tensor(out, dtype=dtype), torch.tensor(lse, dtype=dtype))


def partial(query, key, value):
    """State of one query over some keys, by the oracle."""
    out, lse = dense_row(query, key, value, 1.0)
    return state(out.tolist(), lse)


def check_same(left, right, tolerance=1e-12):
    assert torch.isfinite(left.out).all()
    torch.testing.assert_close(left.out, right.out, rtol=0, atol=tolerance)
    torch.testing.assert_close(left.lse, right.lse, rtol=1e-15, atol=tolerance)


def random_states(seed, count, shape=(3, 2), width=4):
    generator = np.random.default_rng(seed)
    return [
        state(generator.standard_normal((*shape, width)), generator.standard_normal(shape) * 3)
        for _ in range(count)
    ]


@st.composite
def split_attention(draw):
    """A query, its keys, and a cut of the keys into parts, some of them empty."""
    seed = draw(st.integers(0, 2**32 - 1))
    count = draw(st.integers(0, 30))
    owners = np.array(draw(st.lists(st.integers(0, 4), min_size=count, max_size=count)), int)
    offset = draw(st.sampled_from([0.0, 30.0, 1e4]))
    generator = np.random.default_rng(seed)
    query = generator.standard_normal(3)
    key, value = generator.standard_normal((count, 3)), generator.standard_normal((count, 2))
    # The offset pulls the scores of one part up by that much.
    key[owners == 2] += offset * query / (query @ query)
    return query, key, value, owners


def test_two_parts_by_hand():
    # Weights e^0 : e^(ln 7) = 1 : 7, so (0 + 7 * 8) / 8 = 7, and ln 8.
    check_same(merge([state([0.0], 0.0), state([8.0], math.log(7))]), state([7.0], math.log(8)))


def test_an_empty_part_between_two_by_hand():
    # Weights 1 : 3, so (2 + 18) / 4 = 5, and ln 4; the middle part holds what kernels leave there.
    for lse in (INF, -INF, NAN):
        parts = [state([2.0], 0.0), state([NAN], lse), state([6.0], math.log(3))]
        visible = torch.tensor([True, False, True])
        check_same(merge(parts, visible), state([5.0], math.log(4)))


def test_base_two_is_converted_at_the_border():
    # Base 2: 1 and 2 weigh 2 : 4. Read as natural they would weigh 0.269 : 0.731.
    parts = [
        AttentionState.from_base2(torch.tensor([3.0]), torch.tensor(1.0)),
        AttentionState.from_base2(torch.tensor([6.0]), torch.tensor(2.0)),
    ]
    check_same(merge(parts), state([5.0], math.log(6), torch.float32), 1e-6)


@given(split_attention())
def test_base_two_states_give_what_natural_ones_give(case):
    query, key, value, owners = case
    natural = [partial(query, key[owners == r], value[owners == r]) for r in range(5)]
    base2 = [AttentionState.from_base2(part.out, part.lse / math.log(2)) for part in natural]
    # A lse near 1e4 carries a rounding of 1e-12 through the division.
    check_same(merge(base2), merge(natural), 1e-10)


def test_half_precision_base_two_widens_to_float32():
    found = AttentionState.from_base2(
        torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor(3.0, dtype=torch.float32)
    )
    assert found.out.dtype == found.lse.dtype == torch.float32
    assert found.lse.item() == pytest.approx(3 * math.log(2))


def test_raw_tensors_never_meet_a_merge():
    with pytest.raises(TypeError, match="only AttentionState can"):
        merge([(torch.zeros(1), torch.zeros(()))])
    with pytest.raises(ValueError, match="0 states"):
        merge([])


@pytest.mark.parametrize(
    ("out", "lse", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(2), "out torch.bfloat16"),
        (torch.zeros(2, 3).half(), torch.zeros(2).half(), "lse torch.float16"),
        (torch.zeros(2, 3), torch.zeros(2, dtype=torch.float64), "lse torch.float64"),
        (torch.zeros(2, 3), torch.zeros(3), "must have the shape"),
    ],
)
def test_a_state_declares_its_precision_and_shape(out, lse, message):
    with pytest.raises(TypeError, match=message):
        AttentionState(out, lse)


def test_sums_are_float32_or_wider():
    assert accumulation_dtype(torch.bfloat16, torch.float16) == torch.float32
    assert accumulation_dtype(torch.bfloat16, torch.float64) == torch.float64


@given(split_attention())
def test_any_split_equals_dense(case):
    query, key, value, owners = case
    parts = [partial(query, key[owners == r], value[owners == r]) for r in range(5)]
    check_same(merge(parts), partial(query, key, value))


@given(split_attention(), st.sampled_from([NAN, INF, -INF]), st.sampled_from([NAN, INF, 0.0]))
def test_payloads_of_empty_parts_have_no_effect(case, lse, out):
    query, key, value, owners = case
    parts, visible = [], []
    for rank in range(5):
        mine = owners == rank
        visible.append(bool(mine.any()))
        own = partial(query, key[mine], value[mine])
        parts.append(own if mine.any() else state([out, out], lse))
    found = merge(parts, torch.tensor(visible))
    check_same(found, partial(query, key, value))
    if not any(visible):
        assert found.out.tolist() == [0.0, 0.0]
        assert found.lse.item() == -INF


def test_without_a_mask_the_identity_is_told_by_its_lse():
    check_same(merge([state([NAN], -INF), state([4.0], 1.0)]), state([4.0], 1.0))


@given(st.integers(0, 999))
def test_nil_is_the_identity_bit_for_bit(seed):
    (some,) = random_states(seed, 1)
    nil = AttentionState.nil(some.out.shape, dtype=torch.float64)
    for states in ([nil, some], [some, nil], [nil, some, nil], [some]):
        found = merge(states)
        assert torch.equal(found.out, some.out)
        assert torch.equal(found.lse, some.lse)


def test_all_empty_is_exactly_nil():
    nil = AttentionState.nil((2, 3))
    assert nil.out.tolist() == [[0.0] * 3] * 2
    assert nil.lse.tolist() == [-INF] * 2
    garbage = AttentionState(torch.full((4, 2, 3), NAN), torch.full((4, 2), NAN))
    for found in (merge([nil, nil]), merge(garbage, torch.zeros(4, 2, dtype=torch.bool))):
        assert torch.equal(found.out, nil.out)
        assert torch.equal(found.lse, nil.lse)


@given(st.integers(0, 999))
def test_order_does_not_matter(seed):
    parts = random_states(seed, 3)
    whole = merge(parts)
    for order in itertools.permutations(parts):
        check_same(merge(order), whole)


@given(st.integers(0, 999))
def test_grouping_does_not_matter(seed):
    a, b, c = random_states(seed, 3)
    check_same(merge([merge([a, b]), c]), merge([a, merge([b, c])]))


@given(st.integers(0, 999), st.integers(1, 5))
def test_stacked_and_listed_states_give_equal_bits(seed, count):
    parts = random_states(seed, count)
    stacked = AttentionState(
        torch.stack([part.out for part in parts]), torch.stack([part.lse for part in parts])
    )
    visible = torch.from_numpy(np.random.default_rng(seed).random((count, 3, 2)) < 0.6)
    listed, found = merge(parts, visible), merge(stacked, visible)
    assert torch.equal(found.out, listed.out)
    assert torch.equal(found.lse, listed.lse)


@given(st.integers(0, 999))
def test_strides_do_not_matter(seed):
    parts = random_states(seed, 3, shape=(4, 3), width=6)
    stacked = AttentionState(
        torch.stack([part.out for part in parts]), torch.stack([part.lse for part in parts])
    )
    # The same numbers, lying in memory heads first, with holes between the columns.
    holed = torch.full((3, 3, 4, 12), NAN, dtype=torch.float64)
    out = holed.transpose(1, 2)[..., ::2]
    out.copy_(stacked.out)
    lse = stacked.lse.transpose(1, 2).contiguous().transpose(1, 2)
    assert not out.is_contiguous()
    found, expected = merge(AttentionState(out, lse)), merge(stacked)
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.lse, expected.lse)


def test_inputs_are_left_alone():
    parts = random_states(5, 3)
    copies = [(part.out.clone(), part.lse.clone()) for part in parts]
    merge(parts)
    for part, (out, lse) in zip(parts, copies, strict=True):
        assert torch.equal(part.out, out)
        assert torch.equal(part.lse, lse)


@pytest.mark.parametrize("lse", [NAN, INF, -INF])
def test_a_broken_lse_with_visible_keys_raises(lse):
    parts = [state([[1.0], [1.0]], [0.0, 0.0]), state([[2.0], [2.0]], [0.0, lse])]
    seen = torch.ones(2, 2, dtype=torch.bool)
    with pytest.raises(
        NumericsError, match=r"lse of a part that saw keys, first at index \[1, 1\]"
    ):
        merge(parts, seen)


@pytest.mark.parametrize("out", [NAN, INF])
def test_a_broken_output_with_visible_keys_raises(out):
    # Even at a weight that underflows to 0.
    parts = [state([1.0], 2000.0), state([out], 0.0)]
    with pytest.raises(NumericsError, match="output of a part that saw keys"):
        merge(parts, torch.tensor([True, True]))


@pytest.mark.parametrize(("out", "lse"), [(1.0, NAN), (1.0, INF), (1.0, -INF), (NAN, 0.0)])
def test_when_not_strict_a_broken_row_becomes_nan_and_others_do_not(out, lse):
    parts = [state([[1.0], [1.0]], [0.0, 0.0]), state([[3.0], [out]], [0.0, lse])]
    found = merge(parts, torch.ones(2, 2, dtype=torch.bool), strict=False)
    assert found.out[0].item() == pytest.approx(2.0)
    assert found.lse[0].item() == pytest.approx(math.log(2))
    assert math.isnan(found.out[1].item())


def test_a_sink_is_one_more_state():
    generator = np.random.default_rng(3)
    query, key, value = (generator.standard_normal(shape) for shape in [(3,), (6, 3), (6, 2)])
    sink = 0.7
    scores = np.append(key @ query, sink)
    shares = np.exp(scores) / np.exp(scores).sum()
    parts = [partial(query, key[:2], value[:2]), partial(query, key[2:], value[2:])]
    found = merge([merge(parts), state([0.0, 0.0], sink)])
    check_same(found, state((shares[:-1] @ value).tolist(), math.log(np.exp(scores).sum())))


def test_float32_partials_are_as_good_as_one_rank():
    """Rounded once to bfloat16, merged float32 partials err like one softmax over all keys."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(48, 128, generator=generator).bfloat16().double()
    key = torch.randn(4096, 128, generator=generator).bfloat16().double()
    value = torch.randn(4096, 128, generator=generator).bfloat16().double()

    def attend(dtype, start, end):
        scores = (query.to(dtype) @ key[start:end].to(dtype).T) * 128**-0.5
        out = torch.softmax(scores, -1) @ value[start:end].to(dtype)
        return AttentionState(out, torch.logsumexp(scores, -1))

    def rms(out):
        return (out.bfloat16().double() - truth).square().mean().sqrt().item()

    truth = attend(torch.float64, 0, 4096).out
    one_rank = rms(attend(torch.float32, 0, 4096).out)
    assert one_rank > 0
    for ranks in (2, 8, 32):
        step = 4096 // ranks
        parts = [attend(torch.float32, r * step, (r + 1) * step) for r in range(ranks)]
        assert rms(merge(parts).out) <= 1.01 * one_rank


@given(st.integers(0, 999), st.integers(1, 6))
def test_weights_are_shares(seed, count):
    generator = np.random.default_rng(seed)
    lses = torch.from_numpy(generator.standard_normal((count, 5)) * 50)
    seen = torch.from_numpy(generator.random((count, 5)) < 0.5)
    shares, lse = weights(torch.where(seen, lses, NAN), seen)
    assert (shares[~seen] == 0).all()
    some = seen.any(0)
    torch.testing.assert_close(shares.sum(0), some.double(), rtol=0, atol=1e-12)
    expected = torch.logsumexp(torch.where(seen, lses, -INF), 0)
    torch.testing.assert_close(lse, expected, rtol=0, atol=1e-12)


def test_weigh_selects_and_never_multiplies():
    out = torch.tensor([[NAN, INF], [2.0, 3.0]])
    found = weigh(out, torch.tensor([0.0, 0.5]), torch.tensor([False, True]))
    assert found.tolist() == [[0.0, 0.0], [1.0, 1.5]]


def test_concatenate_puts_rows_below_each_other():
    first, second = state([[1.0], [2.0]], [1.0, 2.0]), state([[3.0]], [3.0])
    found = concatenate([first, second])
    assert found.out.tolist() == [[1.0], [2.0], [3.0]]
    assert found.lse.tolist() == [1.0, 2.0, 3.0]
    assert concatenate([first]) is first
