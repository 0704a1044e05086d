"""Readings that every family shares."""

from __future__ import annotations

from pathlib import Path

import pytest

from heddle.errors import UnsupportedError
from heddle.models.config_common import bos_token_id, checkpoint_dtype, require_silu
from heddle.models.config_fields import Fields


def fields(**data: object) -> Fields:
    return Fields(Path("config.json"), data)


def test_both_spellings_of_the_dtype() -> None:
    assert checkpoint_dtype(fields(dtype="bfloat16")) == "bfloat16"
    assert checkpoint_dtype(fields(torch_dtype="torch.float16")) == "float16"
    assert checkpoint_dtype(fields()) == "float32"


def test_bos() -> None:
    assert bos_token_id(fields(bos_token_id=4)) == 4
    assert bos_token_id(fields()) is None


def test_another_activation_is_refused() -> None:
    require_silu(fields(hidden_act="silu"))
    with pytest.raises(UnsupportedError, match="hidden_act='gelu' is not supported; known: silu"):
        require_silu(fields(hidden_act="gelu"))
