"""Laws of every backend in the registry, against dense float64 attention."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.attention.backends import BACKENDS, LIBRARIES, create_backend
from heddle.attention.state import AttentionState, merge
from heddle.errors import ConfigError
from heddle.layout import resolve
from tests.attention.backends.inputs import HEAD_MAPS, check, make_inputs

NAMES = list(BACKENDS)


@st.composite
def visible_lengths(draw):
    """Constant, rising, two segments, a staircase, or anything; with the number of keys."""
    rows = draw(st.integers(0, 12))
    first = draw(st.integers(0, 20))
    kind = draw(st.sampled_from(["constant", "rising", "staircase", "segments", "any"]))
    match kind:
        case "constant":
            lengths = np.full(rows, first)
        case "rising":
            lengths = first + np.arange(rows)
        case "staircase":
            lengths = first + np.arange(rows) // 2
        case "segments":
            lengths = np.concatenate([np.arange(rows), first + np.arange(rows)])
        case _:
            lengths = np.array(draw(st.lists(st.integers(0, 20), min_size=rows, max_size=rows)))
    lengths = lengths.astype(np.int64)
    return lengths, int(lengths.max(initial=0)) + draw(st.integers(0, 3))


@pytest.mark.parametrize("name", NAMES)
@given(
    case=visible_lengths(),
    head_map=st.sampled_from(list(HEAD_MAPS)),
    widths=st.sampled_from([(8, 8), (7, 4), (3, 5)]),
    seed=st.integers(0, 99),
)
def test_equals_dense_attention_with_a_true_lse(name, case, head_map, widths, seed):
    visible, keys = case
    inputs = make_inputs(head_map, len(visible), keys, widths, seed=seed)
    # What no row sees may hold anything.
    poisoned = [tensor.clone() for tensor in (inputs.key, inputs.value)]
    for tensor in poisoned:
        tensor[visible.max(initial=0) :] = math.nan
    state = create_backend(name).attend(inputs.query, *poisoned, inputs.runs, visible, 0.37)
    check(state, inputs.oracle(visible, 0.37))
    for lane, head in enumerate(inputs.lanes):
        blind = visible == 0 if head is not None else np.ones(len(visible), bool)
        assert (state.out[blind, lane] == 0).all()
        assert (state.lse[blind, lane] == -math.inf).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("head_map", ["9q3kv", "one", "uneven"])
@pytest.mark.parametrize(
    ("rows", "keys", "is_rising"),
    [(1, 8195, False), (2, 8192, False), (70, 700, True), (140, 140, True), (40, 2500, False)],
)
def test_long_inputs_equal_dense_attention(name, head_map, rows, keys, is_rising):
    inputs = make_inputs(head_map, rows, keys, (16, 16))
    visible = keys - rows + 1 + np.arange(rows) if is_rising else np.full(rows, keys)
    state = create_backend(name).attend(
        inputs.query, inputs.key, inputs.value, inputs.runs, visible, 0.25
    )
    check(state, inputs.oracle(visible, 0.25))


@pytest.mark.parametrize("name", NAMES)
def test_a_number_means_the_same_length_for_all_rows(name):
    inputs = make_inputs("9q3kv", 4, 9)
    backend = create_backend(name)
    tensors = (inputs.query, inputs.key, inputs.value, inputs.runs)
    one, each = backend.attend(*tensors, 6, 1.0), backend.attend(*tensors, np.full(4, 6), 1.0)
    assert torch.equal(one.out, each.out)
    assert torch.equal(one.lse, each.lse)
    check(one, inputs.oracle([6] * 4, 1.0))


@pytest.mark.parametrize("name", NAMES)
@given(cuts=st.lists(st.integers(0, 24), max_size=4), seed=st.integers(0, 99))
@settings(max_examples=20)
def test_keys_in_pieces_merge_to_the_whole(name, cuts, seed):
    inputs = make_inputs("pads", 3, 24, seed=seed)
    backend = create_backend(name)
    borders = sorted({0, 24, *cuts})
    parts = [
        backend.attend(inputs.query, inputs.key[a:b], inputs.value[a:b], inputs.runs, b - a, 0.5)
        for a, b in pairwise(borders)
    ]
    check(merge(parts), inputs.oracle([24] * 3, 0.5))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("widths", [(8, 8), (8, 6)])
def test_a_row_without_keys_is_nil_even_beside_poisoned_ones(name, widths):
    inputs = make_inputs("9q3kv", 3, 6, widths, seed=8)
    query = inputs.query.clone()
    query[1] = math.nan  # a pad row
    key = inputs.key.clone()
    key[2] = math.nan
    value = key[..., : widths[1]]
    state = create_backend(name).attend(query, key, value, inputs.runs, np.array([2, 0, 6]), 1.0)
    assert (state.out[1] == 0).all()
    assert (state.lse[1] == -math.inf).all()
    # The row that sees the poison cannot pass as text.
    assert state.out[2].isnan().all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("widths", [(16, 16), (16, 12)])
@pytest.mark.parametrize("place", [0, 255, 256, 8192])
@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("rows", [1, 20])
def test_a_visible_nan_always_reaches_the_output(name, widths, place, side, rows):
    inputs = make_inputs("9q3kv", rows, 8193, widths, dtype=torch.float32)
    key, value = inputs.key.clone(), inputs.value.clone()
    (key if side == "key" else value)[place] = math.nan
    state = create_backend(name).attend(inputs.query, key, value, inputs.runs, 8193, 0.25)
    assert state.out.isnan().all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("widths", "rising"), [((16, 16), True), ((16, 16), False), ((18, 16), True)]
)
def test_narrow_dtypes_err_at_most_twice_the_plain_softmax(name, dtype, widths, rising):
    inputs = make_inputs("9q3kv", 33, 400, widths, dtype)
    visible = 368 + np.arange(33) if rising else np.full(33, 400)
    out, lse = inputs.oracle(visible, 0.25)
    plain = make_plain(inputs, visible, 0.25)
    state = create_backend(name).attend(
        inputs.query, inputs.key, inputs.value, inputs.runs, visible, 0.25
    )
    # Partials are float32 and not rounded to 16 bits.
    assert state.out.dtype == state.lse.dtype == torch.float32
    step = torch.finfo(torch.float32).eps
    assert (state.out - out).abs().max() <= 2 * (
        plain.out - out
    ).abs().max() + step * out.abs().max()
    assert (state.lse - lse).abs().max() <= 2 * (
        plain.lse - lse
    ).abs().max() + step * lse.abs().max()


def make_plain(inputs, visible, scale):
    """A float32 softmax, written here."""
    query, key, value = inputs.query.float(), inputs.key.float(), inputs.value.float()
    scores = torch.einsum("rhd,lhd->rhl", query, key[:, inputs.lanes]) * scale
    sees = torch.arange(len(key)) < torch.from_numpy(visible)[:, None]
    scores = scores.masked_fill(~sees[:, None], -math.inf)
    out = torch.einsum("rhl,lhd->rhd", torch.softmax(scores, -1), value[:, inputs.lanes])
    return AttentionState(out, torch.logsumexp(scores, -1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("widths", [(8, 8), (8, 6)])
def test_large_scores_stay_finite_and_normalised(name, widths):
    inputs = make_inputs("9q3kv", 5, 40, widths, torch.float32)
    value = torch.ones_like(inputs.value)
    # Scores of about 1e4: rounding blurs who wins, but shares still sum to 1.
    state = create_backend(name).attend(inputs.query, inputs.key, value, inputs.runs, 40, 4e3)
    assert state.lse.max() > 1e4
    torch.testing.assert_close(state.out, torch.ones_like(state.out), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_left_alone(name):
    for widths in [(8, 8), (8, 6)]:
        inputs = make_inputs("9q3kv", 4, 9, widths)
        copies = [tensor.clone() for tensor in (inputs.query, inputs.key, inputs.value)]
        create_backend(name).attend(
            inputs.query, inputs.key, inputs.value, inputs.runs, np.array([1, 9, 2, 0]), 1.0
        )
        for tensor, copy in zip((inputs.query, inputs.key, inputs.value), copies, strict=True):
            assert torch.equal(tensor, copy)


@pytest.mark.parametrize("name", NAMES)
def test_visible_beyond_the_keys_is_refused(name):
    inputs = make_inputs("9q3kv", 2, 3)
    with pytest.raises(ValueError, match="must be within the 3 keys"):
        create_backend(name).attend(
            inputs.query, inputs.key, inputs.value, inputs.runs, np.array([1, 4]), 1.0
        )


def test_capabilities_are_told_in_words():
    ask = {"key_width": 8, "value_width": 8}
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for name in NAMES:
        backend = create_backend(name)
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            assert backend.unsupported_reasons(dtype=dtype, device=cpu, **ask) == []
        reasons = backend.unsupported_reasons(dtype=torch.int64, device=cpu, **ask)
        assert [reason.split(";")[0] for reason in reasons] == ["dtype torch.int64"]
    both = create_backend("torch").unsupported_reasons(dtype=torch.int8, device=cuda, **ask)
    assert len(both) == 2
    assert "device cuda; backend 'torch' needs cpu" in both[1]


def test_the_settings_offer_exactly_these_backends():
    assert (*NAMES, *LIBRARIES) == resolve._BACKENDS


def test_registry_names_and_refusal():
    assert NAMES == ["torch", "reference", "numba"]
    for name in NAMES:
        assert create_backend(name).name == name
    assert create_backend("auto").name == "torch"
    with pytest.raises(ConfigError, match=r"backend 'fa3' is not known.*auto, torch, reference"):
        create_backend("fa3")
