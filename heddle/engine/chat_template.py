"""Chat messages to prompt text, by the model's own template.

Templates are code from a model's files. They run in a sandbox that forbids attribute tricks and
mutation, and see plain data only. The sandbox limits neither time nor memory, so a server renders
in helper processes (`template_helper`); whoever loads a model in his own process renders there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import msgspec
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from heddle.errors import RequestError, quoted

_CODE = "invalid_template_input"
_END_MARK = "\ue000heddle-continue\ue000"
"""Put behind the last message to find its end in the rendered text; private-use characters."""

Message = Mapping[str, Any]


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """What a template is given, and how its text is to end."""

    messages: Sequence[Any]
    """Role and content (text, or a list of text parts) of each turn, oldest first."""
    add_generation_prompt: bool = True
    """End with the opening of the assistant's turn."""
    continue_final_message: bool = False
    """End inside the last message, so that the answer goes on there."""
    tools: Sequence[Any] | None = None
    """JSON schemas for templates that describe tools."""
    extra: Mapping[str, Any] = {}
    """Further variables."""


_LIMITS = (RecursionError, MemoryError)
"""Of this process, not of a template; who renders says what they mean."""


class ChatTemplate:
    """A compiled template and the special tokens it names."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile.

        Args:
            source: Jinja text.
            special_tokens: `bos_token`, `eos_token`, ... as the template names them.
        Raises:
            RequestError: not a template.
        """
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except _LIMITS:
            raise
        except Exception as error:  # a SyntaxError of Python, an overflow that is worked out early
            raise RequestError(f"the chat template cannot be read: {error}", _CODE) from error

    def render(self, conversation: Conversation, max_characters: int | None = None) -> str:
        """Render one conversation.

        Args:
            conversation: what is said, and how the text is to end.
            max_characters: of the text; None: any number.
        Raises:
            RequestError: no messages, both endings asked for, too long a text, or the template
                refuses.
        """
        if conversation.add_generation_prompt and conversation.continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message are both true; choose one", _CODE
            )
        turns = [_plain_message(message) for message in conversation.messages]
        if not turns:
            raise RequestError("messages=[] is not legal; a conversation has at least one message")
        if conversation.continue_final_message:
            turns[-1]["content"] += _END_MARK
        text = self._render(
            {
                **self._special_tokens,
                "documents": None,
                **_plain(conversation.extra),
                "messages": turns,
                "tools": _plain(conversation.tools) if conversation.tools else None,
                "add_generation_prompt": conversation.add_generation_prompt,
            },
            max_characters,
        )
        return _cut_at_mark(text) if conversation.continue_final_message else text

    def _render(self, variables: dict[str, Any], max_characters: int | None) -> str:
        pieces: list[str] = []
        left = max_characters
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                if left is not None and (left := left - len(piece)) < 0:
                    raise RequestError(
                        f"the chat template makes more than {max_characters} characters of this "
                        "conversation",
                        _CODE,
                    )
        except (RequestError, *_LIMITS):
            raise
        except Exception as error:  # a template is a program of a stranger, and raises what it will
            message = f"the chat template refuses these messages: {error}"
            raise RequestError(message, _CODE) from error
        return "".join(pieces)


def _plain_message(message: Any) -> dict[str, Any]:
    """Plain data without nulls; text parts are joined, since few templates take lists."""
    if not isinstance(message, Mapping):
        raise RequestError(f"a message is a mapping with a role, not {type(message).__name__}")
    if not isinstance(message.get("role"), str):
        raise RequestError(f"the 'role' of a message is text, not {quoted(message.get('role'))}")
    plain: dict[str, Any] = {k: v for k, v in _plain(message).items() if v is not None}
    content = plain.get("content", "")
    if isinstance(content, list):
        content = "".join(_part_text(part) for part in content)
    if not isinstance(content, str):
        raise RequestError("message content is a string, a list of text parts, or absent")
    plain["content"] = content
    return plain


def _part_text(part: Any) -> str:
    if isinstance(part, dict) and part.get("type", "text") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise RequestError("only text parts are served", "unsupported_content")


def _plain(value: Any) -> Any:
    """JSON data rebuilt from exact built-in types: a template meets no other methods."""
    if value is None or isinstance(value, bool):
        return value
    for exact in (str, int, float):
        if isinstance(value, exact):
            return exact(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise RequestError(f"a {type(value).__name__} cannot be passed to a chat template", _CODE)


def _cut_at_mark(text: str) -> str:
    end = text.rfind(_END_MARK)
    if end < 0:
        raise RequestError("the chat template does not show the last message", _CODE)
    return text[:end]


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks assistant text for training; here it is just
    text."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it without ClassVar

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Drop the tags, keep the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not the sandbox's own filter: that one escapes HTML, which models were not trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
