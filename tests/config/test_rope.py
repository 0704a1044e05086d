"""A variant changes exactly where the rotation does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.config.model import RopeConfig
from heddle.config.rope import depends_on_length, rope_variant

WINDOW = 100
LONGROPE = RopeConfig(rope_type="longrope", original_max_position_embeddings=WINDOW)
DYNAMIC = RopeConfig(rope_type="dynamic", factor=4.0, original_max_position_embeddings=WINDOW)


@given(st.integers(1, 1 << 40))
def test_lengths_within_the_window_are_one_variant(length: int) -> None:
    is_long = length > WINDOW
    assert rope_variant(LONGROPE, length) == (1 if is_long else 0)
    assert rope_variant(DYNAMIC, length) == (length if is_long else 0)


@pytest.mark.parametrize("kind", ["default", "linear", "yarn", "llama3"])
def test_other_kinds_have_one_rotation(kind: str) -> None:
    config = RopeConfig(rope_type=kind, original_max_position_embeddings=WINDOW)  # type: ignore[arg-type]
    assert not depends_on_length(config)
    assert rope_variant(config, 10 * WINDOW) == 0


def test_two_kinds_depend_on_the_length() -> None:
    assert depends_on_length(LONGROPE)
    assert depends_on_length(DYNAMIC)
