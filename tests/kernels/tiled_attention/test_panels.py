"""Passes over panels against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest

from heddle.kernels.compiled import inner
from heddle.kernels.tiled_attention.panels import (
    WIDTH,
    bend,
    clear,
    copy,
    peak_of,
    rescale,
    take,
    weigh,
)


@inner
def weigh_rows(s, count, factor, peak, total):
    weigh(s, count, factor, peak, total)


@inner
def bend_rows(s, count, factor, cap):
    bend(s, count, factor, cap)


@inner
def other_passes(s, t, count, row):
    copy(t, s, count * WIDTH)
    clear(t, WIDTH)
    peak_of(s, count, row)
    rescale(s, count, row)


@inner
def take_three(counter):
    return take(counter), take(counter), take(counter)


def panel(values):
    """A panel that holds values, and its address."""
    rows = np.zeros((-(-len(values) // WIDTH), WIDTH), np.float32)
    rows.reshape(-1)[: len(values)] = values
    return rows, rows.ctypes.data


def test_weights_are_powers_of_two_within_two_units_in_the_last_place():
    rows, at = panel(np.linspace(-140, 127, 4096, dtype=np.float32))
    exact = np.exp2(rows.astype(np.float64))
    peak, total = np.zeros(WIDTH, np.float32), np.ones(WIDTH, np.float32)
    given = rows.copy()
    weigh_rows(at, len(rows), np.float32(1), peak.ctypes.data, total.ctypes.data)
    kept = given > -126
    assert np.max(np.abs(rows[kept] / exact[kept] - 1)) <= 2 * np.finfo(np.float32).eps
    assert (rows[given < -127.5] == 0).all()
    assert np.allclose(total, 1 + exact.sum(0), rtol=1e-6)


def test_weights_are_relative_to_the_peak_of_their_lane():
    rows, at = panel(np.arange(4 * WIDTH) % 7)
    peak = np.arange(WIDTH, dtype=np.float32)
    exact = np.exp2(rows.astype(np.float64) * 0.5 - peak)
    weigh_rows(at, 4, np.float32(0.5), peak.ctypes.data, np.zeros(WIDTH, np.float32).ctypes.data)
    assert np.allclose(rows, exact, rtol=1e-6)


@pytest.mark.parametrize("payload", [0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0x7F800001])
def test_a_weight_of_nan_is_nan_and_of_minus_infinity_zero(payload):
    rows, at = panel([0, -np.inf])
    rows[0, 0] = np.array([payload], np.uint32).view(np.float32)[0]
    room = np.zeros((2, WIDTH), np.float32)
    weigh_rows(at, 1, np.float32(1), room[0].ctypes.data, room[1].ctypes.data)
    assert np.isnan(rows[0, 0])
    assert rows[0, 1] == 0
    assert np.isnan(room[1, 0])


@pytest.mark.parametrize("cap", [1.0, 30.0])
def test_bent_scores_are_within_four_units_in_the_last_place_of_tanh(cap):
    small = np.geomspace(1e-30, 20, 4000)
    rows, at = panel(np.concatenate([-small, small, [0, np.inf, -np.inf]]).astype(np.float32))
    exact = cap * np.tanh(rows.astype(np.float64))
    bend_rows(at, len(rows), np.float32(1), np.float32(cap))
    assert (np.abs(rows - exact) <= 4 * np.finfo(np.float32).eps * np.abs(exact)).all()
    rows[0, 0] = np.nan
    bend_rows(at, 1, np.float32(1), np.float32(cap))
    assert np.isnan(rows[0, 0])


def test_peaks_pass_over_nan_and_start_from_what_they_were():
    rows, at = panel(np.arange(3 * WIDTH) % 11)
    rows[1, 0], rows[:, 1], rows[:, 2] = np.nan, -np.inf, np.nan
    given, room = rows.copy(), np.full((4, WIDTH), 7, np.float32)
    peak = np.full(WIDTH, -np.inf, np.float32)
    peak[3] = 100
    expected = np.fmax(np.fmax.reduce(given), peak)
    expected[2] = -np.inf
    other_passes(at, room.ctypes.data, 3, peak.ctypes.data)
    assert np.array_equal(peak, expected)
    assert np.array_equal(room[1:3], given[1:], equal_nan=True)
    assert (room[0] == 0).all()
    assert (room[3] == 7).all()
    assert np.array_equal(rows[:, 3:], given[:, 3:] * peak[3:])


def test_a_counter_gives_each_number_once():
    counter = np.array([5], np.int64)
    assert take_three(counter.ctypes.data) == (5, 6, 7)
    assert counter[0] == 8
