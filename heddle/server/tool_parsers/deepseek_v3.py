"""Calls of DeepSeek models. Marks are written with U+FF5C and U+2581.

V3:    calls_begin call_begin function sep NAME newline ```json {...} ``` call_end ... calls_end
V3.1:  calls_begin call_begin NAME sep {...} call_end ... calls_end
"""

from __future__ import annotations

from heddle.server.tool_parsers.call_text import CallFormat
from heddle.server.tool_parsers.shape import Fixed, Name, Space

CALLS_BEGIN = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
CALLS_END = "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL_BEGIN = "<\uff5ctool\u2581call\u2581begin\uff5c>"
CALL_END = "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"

# Behind the separator V3 has the name, and V3.1 the arguments.
_HEAD = (
    Name(),
    Fixed(SEPARATOR),
    Name(is_optional=True),
    Space(),
    Fixed("```json", is_optional=True),
    Space(),
)

DEEPSEEK_V3 = CallFormat(
    openers={CALLS_BEGIN: (Space(), Fixed(CALL_BEGIN), *_HEAD), CALL_BEGIN: _HEAD},
    tail=(Space(), Fixed("```", is_optional=True), Space(), Fixed(CALL_END)),
    closers=(CALLS_END,),
)


def suits(template: str) -> bool:
    """A chat template asks for such calls."""
    return CALLS_BEGIN in template
