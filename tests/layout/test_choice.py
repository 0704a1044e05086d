"""A layout in full, and its flags."""

from __future__ import annotations

from hypothesis import given

from heddle.layout.choice import LayoutChoice, ModelFacts
from tests.support.layouts import choices, degrees, read_flags


@given(choices(), choices())
def test_flags_turn_one_choice_into_another(asked: LayoutChoice, other: LayoutChoice) -> None:
    settings = other.settings()
    usual = {name: value if value is not None else 1 for name, value in settings.items()}
    target = LayoutChoice(model=asked.model).with_settings(usual)
    positive = {name: abs(value) for name, value in usual.items() if type(value) is int}
    target = target.with_settings(positive)
    assert read_flags(asked, target.flags(asked)) == target


def test_flags_name_what_differs_from_the_default_or_from_what_was_asked() -> None:
    asked = LayoutChoice(parallel=degrees(1, 1, 3, dcp_q_replicate=True), block_size=32)
    near = LayoutChoice(parallel=degrees(2, 1, 2), block_size=32)
    assert near.flags(asked) == "-tp 2 -pcp 1 -dcp 2 --no-dcp-q-replicate --block-size 32"
    assert LayoutChoice().flags(LayoutChoice()) == "-tp 1 -pcp 1 -dcp 1"


def test_settings_change_in_both_places() -> None:
    changed = LayoutChoice().with_settings({"block_size": 8, "kv_interleave_size": 4})
    assert (changed.block_size, changed.parallel.kv_interleave_size) == (8, 4)
    assert changed.settings()["block_size"] == 8
    assert changed.settings()["kv_interleave_size"] == 4


def test_the_window_is_what_was_asked_or_the_models() -> None:
    model = ModelFacts(num_query_heads=8, num_kv_heads=2, window=4096)
    assert LayoutChoice(model=model).window == 4096
    assert LayoutChoice(model=model, max_model_len=100).window == 100
    assert LayoutChoice().window is None
