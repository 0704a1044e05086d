from __future__ import annotations

import math
from typing import Any

import pytest

from heddle.config import EngineConfig
from heddle.config.engine import MAX_THREADS, MAX_TIMEOUT_SECONDS
from heddle.errors import ConfigError

TIMEOUTS = ("step_timeout_seconds", "startup_timeout_seconds", "group_timeout_seconds")


@pytest.mark.parametrize("name", TIMEOUTS)
@pytest.mark.parametrize(
    ("seconds", "nearest"),
    [(0.0, 1), (-3.0, 1), (math.nan, 1), (math.inf, MAX_TIMEOUT_SECONDS), (1e9, 1_000_000)],
)
def test_limit_that_no_clock_can_keep_is_refused(name: str, seconds: float, nearest: int) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}=.* \(nearest: {nearest}\)$"):
        EngineConfig(model="demo", **{name: seconds})
    assert getattr(EngineConfig(model="demo", **{name: nearest}), name) == nearest


def test_threads_that_no_runtime_starts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_threads=9999999 .* \(nearest: 1024\)"):
        EngineConfig(model="demo", num_threads=9_999_999)
    assert EngineConfig(model="demo", num_threads=MAX_THREADS).num_threads == 1024


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", None),
        ("seed", "7"),
        ("seed", 1.5),
        ("num_threads", "2"),
        ("num_threads", 1.5),
        ("max_model_len", "512"),
        *((name, value) for name in TIMEOUTS for value in ("5", None)),
    ],
)
def test_value_of_another_type_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}={value!r} is not legal; it is a .*number$"):
        EngineConfig(model="demo", **{name: value})


@pytest.mark.parametrize(
    ("name", "kind"), [("speculative", "SpeculativeConfig"), ("link_costs", "LinkCosts")]
)
@pytest.mark.parametrize("value", ["x", {}, 0, False])
def test_a_part_of_another_class_is_refused_by_name(name: str, kind: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}=.* it is a {kind}, or None"):
        EngineConfig(model="demo", **{name: value})
    assert getattr(EngineConfig(model="demo", **{name: None}), name) is None
