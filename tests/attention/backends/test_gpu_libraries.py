"""The seam of GPU libraries, with a plain kernel in the place of theirs."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.attention.backends import LIBRARIES, create_backend
from heddle.attention.backends.base import KeyRange
from heddle.attention.backends.gpu_libraries import (
    LibraryBackend,
    Mask,
    create_flash_attn,
    create_flashinfer,
)
from heddle.attention.state import AttentionState
from tests.attention.backends.inputs import HEAD_MAPS, check, dense_masked, make_inputs

CREATORS = {"flashinfer": create_flashinfer, "flash_attn": create_flash_attn}
CPU = torch.device("cpu")


def plain(query, key, value, scale, softcap, mask):
    """What both libraries document: masks aligned at the bottom right, one sequence."""
    rows, keys, group = len(query), len(key), query.shape[1] // key.shape[1]
    wide = (key.repeat_interleave(group, 1), value.repeat_interleave(group, 1))
    scores = torch.einsum("rhd,lhd->rhl", query, wide[0]) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if mask.is_causal:
        own = keys - rows + torch.arange(rows)[:, None, None]
        places = torch.arange(keys)
        seen = places <= own
        if mask.window is not None:
            seen &= places > own - mask.window
        scores = scores.masked_fill(~seen, -torch.inf)
    out = torch.einsum("rhl,lhd->rhd", torch.softmax(scores, -1), wide[1])
    return AttentionState(out, torch.logsumexp(scores, -1))


def plain_backend():
    return LibraryBackend("plain", "torch", plain, lambda *_: True, "any")


@st.composite
def ranges(draw):
    """Long stretches of every pattern, or ranges without one."""
    first, length = draw(st.integers(0, 6)), draw(st.integers(1, 8))
    rows = draw(st.integers(0, 40))
    steps = np.arange(rows)
    match draw(st.sampled_from(["constant", "causal", "band", "two", "any"])):
        case "constant":
            return np.full(rows, first), np.full(rows, first + length)
        case "causal":
            return np.full(rows, first), first + steps  # the first row sees nothing
        case "band":
            return first + steps, first + length + steps
        case "two":
            both = np.concatenate([steps, steps])
            return np.full(2 * rows, first), first + length + both
    pairs = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=5))
    found = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return found.min(1), found.max(1)


@given(
    bounds=ranges(),
    head_map=st.sampled_from(list(HEAD_MAPS)),
    softcap=st.sampled_from([0.0, 2.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=25)
def test_calls_cover_what_each_row_sees(bounds, head_map, softcap, seed):
    first, end = (bound.astype(np.int64) for bound in bounds)
    inputs = make_inputs(head_map, len(end), int(end.max(initial=0)) + 2, seed=seed)
    state = plain_backend().attend(
        inputs.query, inputs.key, inputs.value, inputs.runs, KeyRange(first, end), 0.4, softcap
    )
    expected = dense_masked(inputs, first, end, 0.4, softcap)
    check(state, expected)


def test_a_stretch_is_one_call_for_each_group_of_heads():
    calls = []

    def counted(query, key, value, scale, softcap, mask):
        calls.append((len(query), len(key), mask))
        return plain(query, key, value, scale, softcap, mask)

    inputs = make_inputs("9q3kv", 40, 60)
    backend = LibraryBackend("plain", "torch", counted, lambda *_: True, "any")
    tensors = (inputs.query, inputs.key, inputs.value, inputs.runs)
    backend.attend(*tensors, 5 + np.arange(40), 1.0)
    backend.attend(*tensors, KeyRange(np.arange(40), 6 + np.arange(40)), 1.0)
    assert calls == [(40, 44, Mask(is_causal=True)), (40, 45, Mask(is_causal=True, window=6))]


@pytest.mark.parametrize("name", list(CREATORS))
@pytest.mark.parametrize("window", [None, 3])
def test_a_library_is_called_by_its_documented_names(name, window, monkeypatch):
    """The call itself, against stand-ins that give what the libraries document."""
    mask = Mask(is_causal=True, window=window)
    left = -1 if window is None else window - 1

    def single_prefill_with_kv_cache(
        q, k, v, *, causal, kv_layout, sm_scale, window_left, logits_soft_cap, return_lse
    ):
        assert (kv_layout, window_left, return_lse, causal) == ("NHD", left, True, True)
        state = plain(q, k, v, sm_scale, logits_soft_cap, mask)
        return state.out.half(), (state.lse / np.log(2.0)).float()

    def flash_attn_func(q, k, v, *, softmax_scale, causal, window_size, softcap, return_attn_probs):
        right = -1 if window is None else 0
        assert (window_size, return_attn_probs, causal) == ((left, right), True, True)
        state = plain(q[0], k[0], v[0], softmax_scale, softcap, mask)
        return state.out[None].half(), state.lse.T[None].float(), None

    for module, function in (
        ("flashinfer", single_prefill_with_kv_cache),
        ("flash_attn", flash_attn_func),
    ):
        stand_in = types.ModuleType(module)
        setattr(stand_in, function.__name__, function)
        monkeypatch.setitem(sys.modules, module, stand_in)
    inputs = make_inputs("9q3kv", 4, 9)
    backend = CREATORS[name]()
    tensors = (inputs.query, inputs.key, inputs.value)
    found = backend._kernel(*tensors, 0.5, 2.0, mask)
    expected = plain(*tensors, 0.5, 2.0, mask)
    assert found.out.dtype == found.lse.dtype == torch.float32
    torch.testing.assert_close(found.out.double(), expected.out, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.lse.double(), expected.lse, rtol=1e-6, atol=1e-6)


def test_capabilities_are_told_in_words():
    ask = {"dtype": torch.float32, "device": CPU, "key_width": 72, "value_width": 40}
    for name, create in CREATORS.items():
        backend = create()
        assert backend.name == name
        reasons = backend.unsupported_reasons(**ask)
        assert [reason.split(";")[0] for reason in reasons] == [
            f"module {name} is not installed",
            "dtype torch.float32",
            "device cpu",
            "widths 72 and 40",
        ]
    assert plain_backend().unsupported_reasons(**ask)[0].startswith("dtype torch.float32")


def test_the_registry_knows_the_libraries():
    assert list(LIBRARIES) == list(CREATORS)
    for name in LIBRARIES:
        assert create_backend(name).name == name


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(CREATORS))
def test_the_library_itself_attends(name):
    pytest.importorskip(name)
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    inputs = make_inputs("9q3kv", 40, 90, (64, 64))
    cuda = [part.half().cuda() for part in (inputs.query, inputs.key, inputs.value)]
    for visible in (np.full(40, 90), 51 + np.arange(40)):
        found = CREATORS[name]().attend(*cuda, inputs.runs, visible, 0.125)
        expected = inputs.oracle(visible, 0.125)
        torch.testing.assert_close(found.out.cpu().double(), expected[0], rtol=2e-2, atol=2e-3)
        torch.testing.assert_close(found.lse.cpu().double(), expected[1], rtol=1e-3, atol=1e-3)
