"""Heddle: exact context-parallel serving of long-context language models.

Names are loaded when first used, so that `import heddle` costs next to nothing and loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heddle.config.sampling import SamplingParams
    from heddle.config.structured import StructuredOutputsParams
    from heddle.engine.llm import LLM
    from heddle.engine.outputs import CompletionOutput, RequestOutput
    from heddle.errors import (
        ConfigError,
        HeddleError,
        ModelFileError,
        PromptTooLong,
        RankFailed,
        RequestError,
        TopologyError,
        UnsupportedError,
    )

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 - plain alphabetical order
    "CompletionOutput",
    "ConfigError",
    "HeddleError",
    "LLM",
    "ModelFileError",
    "PromptTooLong",
    "RankFailed",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TopologyError",
    "UnsupportedError",
]

_HOMES = {
    "LLM": "heddle.engine.llm",
    "CompletionOutput": "heddle.engine.outputs",
    "RequestOutput": "heddle.engine.outputs",
    "SamplingParams": "heddle.config.sampling",
    "StructuredOutputsParams": "heddle.config.structured",
}
_DEFAULT_HOME = "heddle.errors"


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'heddle' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES.get(name, _DEFAULT_HOME)), name)
    globals()[name] = value  # the next look-up finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
