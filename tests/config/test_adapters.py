"""Bounds of adapters, and the forms in which they are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from heddle.config import AdapterConfig
from heddle.config.adapters import MAX_ADAPTERS, MAX_RANK, adapter_modules
from heddle.engine.args import engine_config
from heddle.errors import ConfigError


@pytest.mark.parametrize("name", ["max_loras", "max_lora_rank"])
@pytest.mark.parametrize("value", [0, -1, True, 1.0, "2", 5000])
def test_a_bound_out_of_range_names_the_nearest_one(name: str, value: Any) -> None:
    nearest = {"max_loras": MAX_ADAPTERS, "max_lora_rank": MAX_RANK}[name] if value == 5000 else 1
    with pytest.raises(ConfigError, match=rf"{name}=.*1 to .*\(nearest: {nearest}\)"):
        AdapterConfig(**{name: value})
    AdapterConfig(**{name: nearest})


def test_names_are_different_and_no_more_than_may_be_held() -> None:
    with pytest.raises(ConfigError, match="names 'a' twice"):
        AdapterConfig(enable_lora=True, lora_modules=(("a", "/x"), ("a", "/y")))
    with pytest.raises(ConfigError, match=r"max_loras=1 .* 2 lora_modules \(nearest: 2\)"):
        AdapterConfig(max_loras=1, lora_modules=(("a", "/x"), ("b", "/x")))


@pytest.mark.parametrize("given", [{"lora_modules": (("a", "/x"),)}, {"lora_dir": "/x"}])
def test_a_setting_without_effect_is_an_error(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(given))} has no effect"):
        AdapterConfig(**given).check_use()
    AdapterConfig(enable_lora=True, **given).check_use()


@pytest.mark.parametrize(
    "value",
    [["a=/x", "b=/y=1"], {"a": "/x", "b": Path("/y=1")}, (("a", "/x"), ["b", "/y=1"])],
)
def test_every_form_of_naming_is_one(value: Any) -> None:
    found = engine_config("demo", enable_lora=True, lora_modules=value)
    assert found.adapters.lora_modules == (("a", "/x"), ("b", "/y=1"))


@pytest.mark.parametrize("value", ["a=/x", 3, ["a"], ["=x"], ["a="], [("a",)], [("a", 3)]])
def test_other_forms_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="NAME=FOLDER"):
        adapter_modules(value)
