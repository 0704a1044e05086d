from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.kernels.rotate import numba_cpu, reference
from heddle.kernels.rotate.reference import HeadNorm, Turns
from tests.kernels.bounds import assert_as_close, randn


@dataclass
class Case:
    heads: torch.Tensor
    num_lanes: int
    turns: Turns
    norm: HeadNorm | None

    def run(self, form, **options):
        return form.rotate(self.heads, self.num_lanes, self.turns, self.norm, **options)

    def to(self, dtype):
        cos, sin, interleaved = self.turns
        norm = self.norm and HeadNorm(self.norm.weight.to(dtype), self.norm.eps)
        turns = Turns(cos.to(dtype), sin.to(dtype), interleaved)
        return Case(self.heads.to(dtype), self.num_lanes, turns, norm)


def make_case(rows, lanes, keys, width, pairs, interleaved, has_norm, seed=0):
    angles = 10 * randn(rows, 1, pairs, seed=seed + 1)
    weight = randn(lanes + keys, width, seed=seed + 2)
    return Case(
        randn(rows, lanes + 2 * keys, width, seed=seed),
        lanes,
        Turns(angles.cos(), angles.sin(), interleaved),
        HeadNorm(weight, 1e-5) if has_norm else None,
    )


@st.composite
def cases(draw):
    width = draw(st.sampled_from([2, 6, 16, 64]))
    return make_case(
        draw(st.integers(0, 4)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 3)),
        width,
        draw(st.integers(1, width // 2)),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 99)),
    )


@given(cases())
@settings(max_examples=50)
def test_equals_the_reference(case):
    before = case.heads.clone()
    parts = zip(
        case.run(numba_cpu), case.run(reference), case.to(torch.float64).run(reference), strict=True
    )
    for found, plain, exact in parts:
        assert_as_close(found, plain, exact)
    assert torch.equal(case.heads, before)


def test_values_are_moved_bit_for_bit():
    case = make_case(3, 2, 2, 8, 4, False, True)
    _, rows = case.run(numba_cpu)
    assert torch.equal(rows[..., 8:], case.heads[:, 4:])


def test_threads_do_not_change_a_bit():
    case = make_case(100, 9, 3, 64, 32, False, True)
    for num_threads in (1, 2, 3):
        for found, one in zip(
            case.run(numba_cpu, num_threads=num_threads), case.run(numba_cpu), strict=True
        ):
            assert torch.equal(found, one)


def test_other_dtypes_and_strides_go_to_the_reference():
    case = make_case(3, 2, 1, 8, 4, False, True)
    wide = make_case(3, 4, 1, 8, 4, False, True)
    gaps = Case(wide.heads[:, 2:], 2, case.turns, case.norm)
    for other in (case.to(torch.float64), case.to(torch.bfloat16), gaps):
        for found, expected in zip(other.run(numba_cpu), other.run(reference), strict=True):
            assert torch.equal(found, expected)
