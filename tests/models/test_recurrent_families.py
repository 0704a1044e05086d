"""Families with recurrent layers equal transformers on one rank; ranks and pieces equal one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.comparison import check_against_transformers
from tests.support.recurrent_models import check_model_in_pieces, check_model_over_ranks

Checkpoint = Callable[[str], Path]
families = pytest.mark.parametrize("name", ["bamba", "minimax", "qwen3-next"])


@families
def test_one_rank_equals_transformers(checkpoint: Checkpoint, name: str) -> None:
    check_against_transformers(checkpoint(name), name)


@families
@pytest.mark.parametrize("tp_size", [2, 3, 4])
def test_several_ranks_equal_one(checkpoint: Checkpoint, name: str, tp_size: int) -> None:
    check_model_over_ranks(checkpoint(name), tp_size)


@families
@pytest.mark.parametrize("cuts", [(1, 2, 3, 20), (16,), (30, 36)])
def test_a_prompt_in_pieces_equals_the_whole(
    checkpoint: Checkpoint, name: str, cuts: tuple[int, ...]
) -> None:
    check_model_in_pieces(checkpoint(name), cuts)
