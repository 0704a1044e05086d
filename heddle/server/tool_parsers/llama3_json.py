"""Calls of Llama 3 models: the answer is a call, or several.

    {"name": "search", "parameters": {"query": "loom"}}; {"name": ...}

With `<|python_tag|>` before it, a call may stand behind other text, too.
"""

from __future__ import annotations

from heddle.server.tool_parsers.call_text import CallFormat
from heddle.server.tool_parsers.shape import Fixed, Space

_TAG = "<|python_tag|>"

LLAMA3_JSON = CallFormat(
    openers={_TAG: (Space(),)},
    start=(Space(), Fixed(_TAG, is_optional=True), Space()),
    between=(
        Space(),
        Fixed(";", is_optional=True),
        Space(),
        Fixed(_TAG, is_optional=True),
        Space(),
    ),
    end=";",
)


def suits(template: str) -> bool:
    """A chat template asks for such calls."""
    return _TAG in template and '"parameters"' in template
