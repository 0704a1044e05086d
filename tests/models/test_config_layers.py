"""Layer types come from the file's list, else from the family's rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from heddle.config.model import ATTENTION, LayerKind
from heddle.config.visibility import Visibility
from heddle.errors import ModelFileError, UnsupportedError
from heddle.models.config_fields import Fields
from heddle.models.config_layers import FULL, SLIDING, read_window_kinds, uniform_window


def kinds(**data: Any) -> tuple[LayerKind, ...]:
    fields = Fields(Path("config.json"), data)
    return read_window_kinds(fields, 3, lambda layer: SLIDING if layer == 0 else FULL, rope="local")


WINDOW = LayerKind(visibility=Visibility("window", 8), rope="local")


def test_the_list_goes_before_the_rule() -> None:
    assert kinds(sliding_window=8) == (WINDOW, ATTENTION, ATTENTION)
    types = [FULL, SLIDING, SLIDING]
    assert kinds(sliding_window=8, layer_types=types) == (ATTENTION, WINDOW, WINDOW)


def test_full_attention_everywhere_needs_no_window_and_no_kinds() -> None:
    assert kinds(layer_types=[FULL] * 3) == ()
    assert uniform_window(3, None) == ()


def test_a_window_everywhere() -> None:
    assert uniform_window(2, 5) == (LayerKind(visibility=Visibility("window", 5)),) * 2


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({}, ModelFileError, "sliding_window is missing"),
        (
            {"layer_types": [FULL]},
            ModelFileError,
            "layer_types=.*one per layer, num_hidden_layers=3",
        ),
        (
            {"layer_types": [FULL, FULL, "chunked_attention"]},
            UnsupportedError,
            "chunked_attention is not known here; known: full_attention, sliding_attention",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    data: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kinds(**data)
