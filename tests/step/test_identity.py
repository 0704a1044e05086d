"""Ranks that were started otherwise have another identity, and a difference is named."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from heddle.config import ResolvedConfig
from heddle.config.link_costs import LinkCosts
from heddle.errors import ConfigError
from heddle.step.identity import check_identity, identity_differences, identity_of, layout_id
from tests.support.flagship import Case, resolve_case
from tests.support.tiny import build_tiny


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> ResolvedConfig:
    folder = build_tiny(tmp_path_factory.mktemp("identity"), "llama-6-2")
    return resolve_case(Path(folder), Case(sizes=(2, 2, 4)))


def nested(resolved: ResolvedConfig, section: str, **values: Any) -> ResolvedConfig:
    inner = dataclasses.replace(getattr(resolved, section), **values)
    return dataclasses.replace(resolved, **{section: inner})


@pytest.mark.parametrize(
    ("section", "values", "name"),
    [
        ("", {"dtype": "float64"}, "dtype"),
        ("", {"backend": "reference"}, "backend"),
        ("", {"seed": 7}, "seed"),
        ("parallel", {"kv_interleave_size": 4}, "parallel.kv_interleave_size"),
        ("cache", {"block_size": 8}, "cache.block_size"),
        ("model", {"rms_norm_eps": 1e-4}, "model.rms_norm_eps"),
    ],
)
def test_another_setting_is_another_identity(
    resolved: ResolvedConfig, section: str, values: dict[str, Any], name: str
) -> None:
    other = (
        nested(resolved, section, **values) if section else dataclasses.replace(resolved, **values)
    )
    assert layout_id(other) != layout_id(resolved)
    found = identity_differences(identity_of(other), identity_of(resolved), "the driver")
    assert [text.split(" is ")[0] for text in found] == [name]
    with pytest.raises(ConfigError, match=rf"than the driver: {name} is .* here, .* on the driver"):
        check_identity(identity_of(other), identity_of(resolved))


@pytest.mark.parametrize(
    "values",
    [
        {"epoch": 3},
        {"model_path": "/elsewhere"},
        {"num_threads": 9},
        {"num_blocks": 77},
        {"link_costs": LinkCosts(alpha=1.0)},
        {"reasons": ("another host",)},
    ],
    ids=lambda values: next(iter(values)),
)
def test_what_a_host_may_choose_changes_nothing(
    resolved: ResolvedConfig, values: dict[str, Any]
) -> None:
    other = dataclasses.replace(resolved, **values)
    assert layout_id(other) == layout_id(resolved) != 0
    check_identity(identity_of(other), identity_of(resolved))


def test_a_whole_number_for_a_float_arrives_as_the_same_setting(resolved: ResolvedConfig) -> None:
    given = nested(resolved, "scheduler", target_itl_ms=50)
    given = dataclasses.replace(given, step_timeout_seconds=60, startup_timeout_seconds=100)
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(given), type=ResolvedConfig)
    assert repr(arrived.step_timeout_seconds) == "60.0"
    check_identity(identity_of(arrived), identity_of(given))
    assert layout_id(arrived) == layout_id(given)


def test_another_version_is_named(resolved: ResolvedConfig) -> None:
    here = identity_of(resolved)
    assert {"python", "heddle-llm", "torch", "numba"} <= here.keys()
    with pytest.raises(ConfigError, match=r"torch is .* here, 1\.0 on the driver; all ranks are"):
        check_identity(here, {**here, "torch": "1.0"})
