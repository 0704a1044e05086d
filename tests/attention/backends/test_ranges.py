"""Laws of every backend for ranges of keys and soft caps, against a dense mask in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from heddle.attention.backends import BACKENDS, create_backend
from heddle.attention.backends.base import KeyRange
from heddle.attention.state import merge
from tests.attention.backends.inputs import HEAD_MAPS, check, dense_masked, make_inputs

NAMES = list(BACKENDS)


def local_len(count, rank, world, run):
    """Tokens of rank `rank` among the first `count`, dealt round in runs."""
    owner = np.arange(200) // run % world == rank
    return np.concatenate([[0], np.cumsum(owner)])[count]


@st.composite
def key_ranges(draw):
    """Ranges of every pattern, whole or one rank's share; rows and keys past `MIN_TILE_ROWS`."""
    rows = draw(st.one_of(st.integers(0, 12), st.integers(60, 150)))
    start = draw(st.integers(0, 20))
    size = draw(st.sampled_from([1, 2, 5, 40, 70]))
    positions = start + np.arange(rows)
    kind = draw(st.sampled_from(["constant", "causal", "window", "chunk", "any"]))
    match kind:
        case "constant":
            first, end = np.full(rows, start), np.full(rows, start + size)
        case "causal":
            first, end = np.full(rows, draw(st.integers(0, start))), positions + 1
        case "window":
            first, end = np.maximum(positions + 1 - size, 0), positions + 1
        case "chunk":
            first, end = positions // size * size, positions + 1
        case _:
            some = st.lists(st.integers(0, 30), min_size=rows, max_size=rows)
            first, end = np.array(draw(some), dtype=np.int64), np.array(draw(some), dtype=np.int64)
    if draw(st.booleans()):
        world, run = draw(st.integers(2, 4)), draw(st.sampled_from([1, 4]))
        first, end = (local_len(bound, world - 1, world, run) for bound in (first, end))
    return first, end, int(end.max(initial=0)) + draw(st.integers(0, 3))


def poison_unseen(inputs, first, end):
    """Key and value with NaN wherever no row sees."""
    places = np.arange(len(inputs.key))
    seen = ((places >= first[:, None]) & (places < end[:, None])).any(0)
    key, value = inputs.key.clone(), inputs.value.clone()
    key[torch.from_numpy(~seen)] = math.nan
    value[torch.from_numpy(~seen)] = math.nan
    return key, value


@pytest.mark.parametrize("name", NAMES)
@given(
    case=key_ranges(),
    head_map=st.sampled_from(list(HEAD_MAPS)),
    widths=st.sampled_from([(8, 8), (7, 4), (3, 5)]),
    softcap=st.sampled_from([0.0, 0.0, 0.8]),
)
@example(
    case=(np.array([9, 0, 0, 4]), np.array([12, 3, 0, 2]), 12),  # holes, and a reversed range
    head_map="pads",
    widths=(8, 8),
    softcap=0.0,
)
def test_each_row_sees_its_range_and_nothing_else(name, case, head_map, widths, softcap):
    first, end, keys = case
    inputs = make_inputs(head_map, len(first), keys, widths)
    key, value = poison_unseen(inputs, first, end)
    state = create_backend(name).attend(
        inputs.query, key, value, inputs.runs, KeyRange(first, end), 0.37, softcap
    )
    check(state, dense_masked(inputs, first, end, 0.37, softcap))
    assert (state.out[first >= end] == 0).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("head_map", ["9q3kv", "one"])
@pytest.mark.parametrize("widths", [(16, 16), (16, 12)])
@pytest.mark.parametrize(
    ("rows", "context", "window", "softcap"),
    [
        (200, 0, 30, 0.0),
        (200, 0, 64, 0.0),
        (200, 900, 300, 0.0),
        (1, 9000, 8200, 0.0),
        (140, 60, 10**6, 1.5),
    ],
)
def test_long_windows_equal_dense_attention(name, head_map, widths, rows, context, window, softcap):
    end = context + 1 + np.arange(rows)
    first = np.maximum(end - window, 0)
    inputs = make_inputs(head_map, rows, context + rows, widths)
    key, value = poison_unseen(inputs, first, end)
    state = create_backend(name).attend(
        inputs.query, key, value, inputs.runs, KeyRange(first, end), 0.25, softcap
    )
    check(state, dense_masked(inputs, first, end, 0.25, softcap))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bounds", [(2, 7), (np.full(4, 2), 7), (2, np.full(4, 7))])
def test_one_number_serves_all_rows(name, bounds):
    inputs = make_inputs("9q3kv", 4, 9)
    state = create_backend(name).attend(
        inputs.query, inputs.key, inputs.value, inputs.runs, KeyRange(*bounds), 1.0
    )
    check(state, dense_masked(inputs, [2] * 4, [7] * 4, 1.0))


@pytest.mark.parametrize("name", NAMES)
@given(cut=st.integers(0, 90), softcap=st.sampled_from([0.0, 1.1]))
def test_two_ranges_of_a_row_merge_to_their_union(name, cut, softcap):
    """As first tokens beside a window do."""
    inputs = make_inputs("9q3kv", 80, 90, seed=3)
    end = np.arange(11, 91)
    backend = create_backend(name)
    parts = [
        backend.attend(
            inputs.query, inputs.key, inputs.value, inputs.runs, KeyRange(*bounds), 0.5, softcap
        )
        for bounds in ((0, np.minimum(end, cut)), (cut, end))
    ]
    check(merge(parts), dense_masked(inputs, [0] * 80, end, 0.5, softcap))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", [100, 102, 163, 299])
@pytest.mark.parametrize("side", ["key", "value"])
def test_a_nan_reaches_every_row_of_the_window_that_sees_it(name, place, side):
    inputs = make_inputs("9q3kv", 200, 300, dtype=torch.float32)
    key, value = inputs.key.clone(), inputs.value.clone()
    (key if side == "key" else value)[place] = math.nan
    end = np.arange(101, 301)
    first = end - 64
    state = create_backend(name).attend(
        inputs.query, key, value, inputs.runs, KeyRange(first, end), 0.25
    )
    sees = torch.from_numpy((first <= place) & (place < end))
    assert sees.any()
    assert state.out[sees].isnan().all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("widths", [(16, 16), (18, 16)])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_narrow_dtypes_err_at_most_twice_the_plain_softmax(name, dtype, widths, softcap):
    inputs = make_inputs("9q3kv", 90, 400, widths, dtype)
    end = np.arange(311, 401)
    first = end - 120
    out, lse = dense_masked(inputs, first, end, 0.25, softcap)
    plain_out, plain_lse = plain_float32(inputs, first, end, 0.25, softcap)
    state = create_backend(name).attend(
        inputs.query, inputs.key, inputs.value, inputs.runs, KeyRange(first, end), 0.25, softcap
    )
    assert state.out.dtype == state.lse.dtype == torch.float32
    step = torch.finfo(torch.float32).eps
    for ours, plain, exact in ((state.out, plain_out, out), (state.lse, plain_lse, lse)):
        bound = 2 * (plain - exact).abs().max() + step * exact.abs().max()
        assert (ours - exact).abs().max() <= bound


def plain_float32(inputs, first, end, scale, softcap):
    """A float32 softmax, written here."""
    query, key, value = inputs.query.float(), inputs.key.float(), inputs.value.float()
    scores = torch.einsum("rhd,lhd->rhl", query, key[:, inputs.lanes]) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    places = torch.arange(len(key))
    hidden = (places < torch.from_numpy(first)[:, None]) | (
        places >= torch.from_numpy(end)[:, None]
    )
    scores = scores.masked_fill(hidden[:, None], -math.inf)
    out = torch.einsum("rhl,lhd->rhd", torch.softmax(scores, -1), value[:, inputs.lanes])
    return out, torch.logsumexp(scores, -1)


@pytest.mark.parametrize("name", NAMES)
def test_a_cap_bounds_the_scores_and_a_large_one_changes_nothing(name):
    inputs = make_inputs("9q3kv", 3, 40)
    backend = create_backend(name)
    tensors = (inputs.query, inputs.key, inputs.value, inputs.runs, 40)
    # Scores of about 1e4 all become -1 or 1.
    capped = backend.attend(*tensors, 4e3, 1.0)
    assert (capped.lse <= math.log(40) + 1).all()
    assert (capped.lse >= math.log(40) - 1).all()
    free, loose = backend.attend(*tensors, 0.3), backend.attend(*tensors, 0.3, 1e8)
    check(loose, (free.out, free.lse))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ((0, 4), "4..4 must be within the 3 keys"),
        ((-1, 2), "first visible key -1; must be at least 0"),
        ((np.zeros(3, dtype=np.int64), 2), r"shape \(3,\); 2 rows"),
    ],
)
def test_ranges_beyond_the_keys_are_refused(name, bounds, message):
    inputs = make_inputs("9q3kv", 2, 3)
    with pytest.raises(ValueError, match=message):
        create_backend(name).attend(
            inputs.query, inputs.key, inputs.value, inputs.runs, KeyRange(*bounds), 1.0
        )
