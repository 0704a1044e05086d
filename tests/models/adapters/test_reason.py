from __future__ import annotations

import dataclasses

import pytest

from heddle.config import AdapterConfig
from heddle.config.model import ForeignConfig
from heddle.engine.adapters import AdapterTable
from heddle.errors import UnsupportedError
from heddle.models.adapters.reason import lora_reason
from tests.support.fake_executor import resolved_config


def test_models_of_another_library_take_no_adapters_and_say_so_at_start() -> None:
    resolved = resolved_config()
    assert lora_reason(resolved.model) == ""
    foreign = dataclasses.replace(
        resolved.model, foreign=ForeignConfig(config_json="{}", refused=())
    )
    on = dataclasses.replace(resolved, model=foreign, adapters=AdapterConfig(enable_lora=True))
    with pytest.raises(UnsupportedError, match=r"enable_lora is not possible .* transformers"):
        AdapterTable(on)
    AdapterTable(dataclasses.replace(on, adapters=AdapterConfig()))
