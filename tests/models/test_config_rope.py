"""Old and new spelling mean the same; unknown kinds are refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from heddle.config.model import RopeConfig
from heddle.errors import ModelFileError, UnsupportedError
from heddle.models.config_fields import Fields
from heddle.models.config_rope import read_rope, settle_rope
from tests.support.models import model_config

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

LONGROPE = {
    "short_factor": [1, 1.5],
    "long_factor": [2, 3],
    "original_max_position_embeddings": 1024,
}


def read(**config: Any) -> RopeConfig:
    return read_rope(
        Fields(Path("config.json"), {"max_position_embeddings": 4096} | config), interleaved=False
    )


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("default", {}, RopeConfig(theta=5e5)),
        ("linear", {"factor": 2}, RopeConfig(theta=5e5, rope_type="linear", factor=2.0)),
        ("llama3", LLAMA3, RopeConfig(theta=5e5, rope_type="llama3", **LLAMA3)),  # type: ignore[arg-type]
        (
            "yarn",
            {"factor": 4.0, "original_max_position_embeddings": 1024, "mscale": 0.7},
            RopeConfig(
                theta=5e5,
                rope_type="yarn",
                factor=4.0,
                original_max_position_embeddings=1024,
                mscale=0.7,
            ),
        ),
        (
            "dynamic",
            {"factor": 2, "original_max_position_embeddings": 7},
            RopeConfig(
                theta=5e5, rope_type="dynamic", factor=2.0, original_max_position_embeddings=4096
            ),
        ),
        (
            "longrope",
            LONGROPE,
            RopeConfig(
                theta=5e5,
                rope_type="longrope",
                factor=4.0,
                original_max_position_embeddings=1024,
                short_factor=(1.0, 1.5),
                long_factor=(2.0, 3.0),
            ),
        ),
        (
            "su",
            LONGROPE | {"factor": 16, "attention_factor": 1.25},
            RopeConfig(
                theta=5e5,
                rope_type="longrope",
                factor=16.0,
                original_max_position_embeddings=1024,
                attention_factor=1.25,
                short_factor=(1.0, 1.5),
                long_factor=(2.0, 3.0),
            ),
        ),
    ],
)
def test_three_spellings_mean_the_same(
    kind: str, values: dict[str, Any], expected: RopeConfig
) -> None:
    assert read(rope_parameters={"rope_theta": 5e5, "rope_type": kind, **values}) == expected
    assert read(rope_theta=5e5, rope_scaling={"rope_type": kind, **values}) == expected
    assert read(rope_theta=5e5, rope_scaling={"type": kind, **values}) == expected


def test_nothing_said_is_the_default() -> None:
    assert read() == RopeConfig(theta=10000.0)
    assert read(rope_scaling=None, rope_theta=2e4) == RopeConfig(theta=2e4)


def test_yarn_fills_what_is_absent() -> None:
    rope = read(rope_scaling={"type": "yarn", "original_max_position_embeddings": 512})
    assert (rope.factor, rope.beta_fast, rope.beta_slow, rope.truncate) == (8.0, 32.0, 1.0, True)
    top_level = read(
        rope_scaling={"type": "yarn", "factor": 2.0}, original_max_position_embeddings=2048
    )
    assert top_level.original_max_position_embeddings == 2048


def test_unknown_kinds_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"rope_scaling\.type='axial'.*known: default, l"):
        read(rope_scaling={"type": "axial", "factor": 2.0})
    with pytest.raises(UnsupportedError, match=r"partial_rotary_factor=0\.5"):
        read(partial_rotary_factor=0.5)


def test_missing_and_malformed_values_are_named() -> None:
    with pytest.raises(ModelFileError, match=r"rope_scaling\.factor is missing"):
        read(rope_scaling={"type": "linear"})
    with pytest.raises(ModelFileError, match=r"rope_parameters\.high_freq_factor=0\.5.*at least"):
        read(rope_parameters={"rope_type": "llama3", **LLAMA3, "high_freq_factor": 0.5})
    with pytest.raises(ModelFileError, match="rope_theta='x'"):
        read(rope_theta="x")
    with pytest.raises(ModelFileError, match=r"rope_scaling\.factor=0\.5 .*at least 1"):
        read(rope_scaling={"type": "dynamic", "factor": 0.5})
    with pytest.raises(ModelFileError, match=r"long_factor=\[1, 'x'\].*numbers above 0"):
        read(rope_scaling={"type": "longrope", **LONGROPE, "long_factor": [1, "x"]})
    with pytest.raises(ModelFileError, match=r"original_max_position_embeddings=1 .*at least 2"):
        read(rope_scaling={"type": "longrope", **LONGROPE, "original_max_position_embeddings": 1})


@pytest.mark.parametrize(("key", "value"), [("beta_fast", -3), ("rope_theta", 1)])
def test_yarn_numbers_without_a_logarithm_are_refused(key: str, value: float) -> None:
    section = {"rope_type": "yarn", "factor": 4.0, key: value}
    config = Fields(Path("f"), {"max_position_embeddings": 64, "rope_parameters": section})
    with pytest.raises(ModelFileError, match=key):
        read_rope(config, interleaved=False)


def test_llama3_factors_may_be_equal() -> None:
    rope = read(rope_parameters={"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0})
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 1.0)


def test_an_absent_theta_is_the_familys() -> None:
    fields = Fields(Path("config.json"), {})
    assert read_rope(fields, interleaved=True, default_theta=7.0) == RopeConfig(
        theta=7.0, interleaved=True
    )


def settle(rope: RopeConfig, **changes: Any) -> int:
    model = model_config(rope=rope, max_position_embeddings=4096, **changes)
    return settle_rope(Fields(Path("config.json"), {}), model).max_position_embeddings


def test_dynamic_stretches_the_window_and_others_leave_it() -> None:
    dynamic = RopeConfig(rope_type="dynamic", factor=2.5, original_max_position_embeddings=4096)
    assert settle(dynamic) == 10240
    assert settle(RopeConfig(rope_type="linear", factor=2.5)) == 4096
    with pytest.raises(ModelFileError, match=r"stretches the window to inf tokens"):
        settle(dataclasses.replace(dynamic, factor=1e308))


def test_two_original_windows_may_not_differ() -> None:
    """The reference asks the top level first, or only the section, by family."""
    known = {"original_max_position_embeddings": 512}
    scaling = {"type": "yarn", "factor": 4.0}
    same = read(rope_scaling=scaling | known, **known)
    assert same == read(rope_scaling=scaling | known) == read(rope_scaling=scaling, **known)
    with pytest.raises(ModelFileError, match="original_max_position_embeddings=512 is not legal"):
        read(rope_scaling=scaling | known, original_max_position_embeddings=256)


def test_factors_of_another_number_than_pairs_are_refused() -> None:
    longrope = read(rope_scaling={"type": "longrope", **LONGROPE})
    assert settle(longrope, head_dim=8, rotary_dim=4) == 4096
    with pytest.raises(ModelFileError, match=r"short_factor.*per rotary pair was expected, 4"):
        settle(longrope, head_dim=8)


def test_the_table_of_windows_may_not_depend_on_the_length() -> None:
    local = read(rope_scaling={"type": "dynamic", "factor": 2})
    with pytest.raises(UnsupportedError, match="rope_type=dynamic in windows"):
        settle(RopeConfig(), local_rope=local)
