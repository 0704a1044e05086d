"""Calls of Hermes and Qwen models.

<tool_call>
{"name": "search", "arguments": {"query": "loom"}}
</tool_call>
"""

from __future__ import annotations

from heddle.server.tool_parsers.call_text import CallFormat
from heddle.server.tool_parsers.shape import Fixed, Space

HERMES = CallFormat(openers={"<tool_call>": (Space(),)}, tail=(Space(), Fixed("</tool_call>")))

_OTHER_FORMATS = ("<function=", "<arg_key>")
"""Templates with these marks put something else than JSON between the tags."""


def suits(template: str) -> bool:
    """A chat template asks for such calls."""
    return "<tool_call>" in template and not any(mark in template for mark in _OTHER_FORMATS)
