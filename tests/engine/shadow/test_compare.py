"""Rounding raises no alarm; a larger difference is placed in token, layer and rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from heddle.engine.shadow.compare import (
    ALARM_TOLERANCE,
    BadToken,
    Verdict,
    compare_probes,
    first_bad_token,
)
from heddle.step.probe import Probed
from tests.support.batches import make_topology

TOPOLOGY = make_topology((5, 1, 5), num_query_heads=12, num_kv_heads=4)
"""12 heads over 5 ranks: some have a pad lane."""
HEADS, WIDTH, WORDS = 12, 8, 50
RNG = np.random.default_rng(3)
LOGITS = RNG.normal(size=WORDS).astype(np.float32) * 5
LAYERS = {layer: RNG.normal(size=(HEADS, WIDTH)).astype(np.float32) for layer in (0, 1)}


def golden(**changes: Any) -> Probed:
    rows = {layer: {0: row.tobytes()} for layer, row in LAYERS.items()}
    return probed(layers=rows, **changes)


def probed(**changes: Any) -> Probed:
    fields: dict[str, Any] = {
        "request_id": 0,
        "epoch": 1,
        "step": 41,
        "token_ids": (3, 4, 5, 6, 7),
        "num_prompt_tokens": 3,
        "rope_length": 20,
        "token_id": int(LOGITS.argmax()),
        "is_greedy": True,
        "logits": LOGITS.tobytes(),
        "layers": {},
    }
    return Probed(**(fields | changes))


def live(error: float = 0.0, off: tuple[int, int] | None = None, **changes: Any) -> Probed:
    """As five ranks compute it; `off` is a layer and a rank whose numbers are wrong."""
    layers: dict[int, dict[int, bytes]] = {}
    for layer, row in LAYERS.items():
        for rank in range(5):
            first, end = TOPOLOGY.heads.query_range(rank)
            lanes = np.full((TOPOLOGY.heads.lanes, WIDTH), np.nan, dtype=np.float32)
            lanes[: end - first] = row[first:end] * (1.5 if off == (layer, rank) else 1)
            layers.setdefault(layer, {})[rank] = lanes.tobytes()
    logits = LOGITS.copy()
    logits[17] += error
    return probed(layers=layers, logits=logits.tobytes(), **changes)


SCALE = float(np.abs(LOGITS).max())


def test_rounding_is_no_alarm_and_a_little_more_is() -> None:
    tolerance = ALARM_TOLERANCE["float32"] * SCALE
    assert compare_probes(live(0.9 * tolerance), golden(), TOPOLOGY, "r") is None
    alarm = compare_probes(live(1.2 * tolerance), golden(), TOPOLOGY, "r")
    assert alarm is not None
    assert alarm.tolerance == pytest.approx(tolerance)
    assert (alarm.layer, alarm.ranks) == (None, ())
    assert "attention was right in every layer" in str(alarm)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("rank", range(5))
def test_the_layer_and_the_rank_are_named(layer: int, rank: int) -> None:
    alarm = compare_probes(live(0.3, (layer, rank)), golden(), TOPOLOGY, "cmpl-7")
    assert alarm is not None
    assert (alarm.layer, alarm.ranks) == (layer, (rank,))
    assert str(alarm) == (
        "request cmpl-7, token 2 of its answer, step 41 of epoch 1: logits differ by 0.3 from one "
        f"rank's, rounding explains {alarm.tolerance:.2g}; the first layer whose attention differs "
        f"is {layer}, on ranks {rank}; its tokens so far are those that one rank draws"
    )


def test_nan_is_an_alarm() -> None:
    logits = LOGITS.copy()
    logits[3] = np.nan
    found = compare_probes(
        dataclasses.replace(live(), logits=logits.tobytes()), golden(), TOPOLOGY, "r"
    )
    assert found is not None


def test_rows_of_other_tokens_are_not_compared() -> None:
    with pytest.raises(ValueError, match="rows after 5 and 2 tokens"):
        compare_probes(live(), golden(token_ids=(3, 4)), TOPOLOGY, "r")


GOOD = Verdict(-1.0, 4, -1.0)
TIE = Verdict(-1.0, 4, -1.0 + ALARM_TOLERANCE["float32"] * SCALE)
BAD = Verdict(-3.0, 9, -1.0)


def test_the_first_bad_token_is_named_near_ties_aside() -> None:
    raw = LOGITS.tobytes()
    assert first_bad_token(live(), [None, BAD, BAD, GOOD, TIE], raw, "float32") is None
    found = first_bad_token(live(), [None, GOOD, GOOD, BAD, BAD], raw, "float32")
    assert found == BadToken(0, 6, 9)
    found = first_bad_token(live(), [None, GOOD, GOOD, GOOD, BAD], raw, "float32")
    assert found == BadToken(1, 7, 9)


def test_the_token_of_the_row_itself_may_be_the_bad_one() -> None:
    worst = int(LOGITS.argmin())
    row = live(token_id=worst)
    found = first_bad_token(row, [None, GOOD, GOOD, GOOD, GOOD], LOGITS.tobytes(), "float32")
    assert found == BadToken(2, worst, int(LOGITS.argmax()))


def test_of_a_drawn_answer_no_token_is_called_bad() -> None:
    row = live(is_greedy=False)
    assert first_bad_token(row, [None, *[BAD] * 4], LOGITS.tobytes(), "float32") is None
