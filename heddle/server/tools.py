"""Which tools a chat request offers, whether one must be called, and who reads the answer.

| tool_choice | the answer | who finds calls |
|---|---|---|
| none | is free; the template shows no tools | nobody |
| auto | is free | the parser of the model's format |
| required | follows the schema of a list of calls | the parser of that list |
| a function | follows the schema of its arguments | all of it is one call |

An answer that follows a grammar has no reasoning: the grammar holds from the first token on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

from heddle.engine.tokenizer import Tokenizer
from heddle.errors import counted
from heddle.server.config import ServerConfig
from heddle.server.errors import ApiError
from heddle.server.pieces import Chained, FirstCall, PieceParser, PlainText, WithoutReasoning
from heddle.server.prompts import plain_tools
from heddle.server.reasoning_parsers import ReasoningParser, find_reasoning_parser
from heddle.server.requests import ChatRequest, Function, NamedTool, StructuredOutputs, Tool
from heddle.server.serving import Serving
from heddle.server.tool_parsers import (
    CallText,
    NewId,
    ToolParser,
    find_tool_parser,
    new_call_id,
    suggest_tool_parser,
    tool_parser_names,
)
from heddle.server.tool_parsers.forced import REQUIRED, calls_schema, only
from heddle.server.tool_parsers.marks import Marks, WithoutMarks

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NO_PARAMETERS: Mapping[str, Any] = {"properties": {}, "additionalProperties": False}

_NOTHING = Marks(())

Choice = Literal["none", "auto", "required"] | NamedTool


class NewParser(Protocol):
    """Makes the parser of an answer."""

    def __call__(self, prompt: str = "") -> PieceParser:
        """A parser, given the text of the prompt, or its end: a template may begin or close the
        reasoning of the answer there. Without it, the parser's own habit counts.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What becomes of the tools of a request, and of its reasoning."""

    shown: Sequence[Mapping[str, Any]] | None
    """To the chat template."""
    grammar: StructuredOutputs | None
    """That the answer must follow, where a call is required."""
    new_parser: NewParser
    """A parser for each answer."""
    call_reason: str
    """How an answer ends that called something and was not cut short."""
    keeps_special_tokens: bool
    """Marks that the parser needs are special tokens: the text must be decoded with all special
    tokens; the parser drops the others, unless the request wants them."""


def check_parser_names(config: ServerConfig) -> None:
    """Refuse names of parsers that nobody registered.

    Raises:
        ConfigError: lists the names that are known.
    """
    if config.tool_call_parser:
        find_tool_parser(config.tool_call_parser)
    if config.reasoning_parser:
        find_reasoning_parser(config.reasoning_parser)


def plan_tools(asked: ChatRequest, serving: Serving) -> ToolUse:
    """Read the tool fields of a request.

    Raises:
        ApiError: one is not legal, two contradict each other, or the server was started without
            what they need; names the remedy.
    """
    choice = _checked_choice(asked)
    grammar = _grammar(asked, choice)
    # Of a model's own format there is nothing in an answer that follows a grammar.
    is_free = not _asks_for_grammar(asked) and grammar is None
    calls = _auto_parser(asked, serving) if choice == "auto" else None
    reasoning = _reasoning_parser(serving) if is_free else None
    marks = _marks(calls if is_free else None, reasoning)
    specials = _special_texts(serving) if marks else frozenset()
    keeps = bool(marks & specials)
    drops = keeps and asked.skip_special_tokens is not False
    return ToolUse(
        shown=None if choice == "none" else plain_tools(asked.tools),
        grammar=grammar,
        new_parser=_Parsing(
            calls=_call_parser(choice, calls if is_free else None),
            is_single=asked.parallel_tool_calls is False,
            reasoning=reasoning,
            tells_reasoning=asked.include_reasoning is not False,
            dropped=_other_texts(specials, marks) if drops else _NOTHING,
        ),
        call_reason="stop" if isinstance(choice, NamedTool) else "tool_calls",
        keeps_special_tokens=keeps,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parsing:
    """How an answer is read: special tokens out, then reasoning, then calls."""

    calls: Callable[[NewId], PieceParser]
    is_single: bool
    reasoning: ReasoningParser | None
    tells_reasoning: bool
    dropped: Marks

    def __call__(self, prompt: str = "", new_id: NewId = new_call_id) -> PieceParser:
        parser = self.calls(new_id)
        if self.is_single:
            parser = FirstCall(parser)
        if self.reasoning is not None:
            parser = Chained(self.reasoning.create(prompt), parser)
            parser = parser if self.tells_reasoning else WithoutReasoning(parser)
        return WithoutMarks(self.dropped, parser) if self.dropped.texts else parser


def _checked_choice(asked: ChatRequest) -> Choice:
    """What is chosen, once the fields are legal."""
    tools, choice = asked.tools, asked.tool_choice
    if tools is None:
        if choice is not None:
            raise ApiError("tool_choice needs tools", param="tool_choice")
        return "none"
    if not 1 <= len(tools) <= MAX_TOOLS:
        raise ApiError(
            f"tools has {counted(len(tools), 'entry', 'entries')}; must be 1 to {MAX_TOOLS}",
            param="tools",
        )
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        _check_function(tool.function, f"tools.{index}.function", seen)
    if isinstance(choice, NamedTool) and choice.function.name not in seen:
        raise ApiError("tool_choice names none of the tools", param="tool_choice.function.name")
    return choice or "auto"


def _check_function(function: Function, place: str, seen: set[str]) -> None:
    if not _NAME.fullmatch(function.name):
        raise ApiError(
            f"{place}.name has to be 1 to 64 letters, digits, _ or -", param=f"{place}.name"
        )
    if function.name in seen:
        raise ApiError(f"{place}.name is the name of an earlier tool", param=f"{place}.name")
    seen.add(function.name)
    if (function.parameters or {}).get("type", "object") != "object":
        raise ApiError(
            f"{place}.parameters is not the schema of an object; its type has to be object",
            param=f"{place}.parameters.type",
        )


def _grammar(asked: ChatRequest, choice: Choice) -> StructuredOutputs | None:
    if choice in ("none", "auto"):
        return None
    if _asks_for_grammar(asked):
        name = "response_format" if asked.structured_outputs is None else "structured_outputs"
        raise ApiError(
            f"{name} and a required tool call are two forms of one answer; give one", param=name
        )
    functions = [(tool.function.name, _parameters(tool)) for tool in asked.tools or ()]
    if isinstance(choice, NamedTool):
        return StructuredOutputs(json=dict(dict(functions)[choice.function.name]))
    most = 1 if asked.parallel_tool_calls is False else None
    return StructuredOutputs(json=calls_schema(functions, most))


def _parameters(tool: Tool) -> Mapping[str, Any]:
    """Schema of the arguments; a function without one takes none."""
    given = tool.function.parameters
    return {"type": "object", **(_NO_PARAMETERS if given is None else given)}


def _asks_for_grammar(asked: ChatRequest) -> bool:
    form = asked.response_format
    return asked.structured_outputs is not None or (form is not None and form.type != "text")


def _auto_parser(asked: ChatRequest, serving: Serving) -> ToolParser:
    config = serving.config
    if not config.enable_auto_tool_choice:
        raise _no_auto("--enable-auto-tool-choice")
    if config.tool_call_parser:
        return find_tool_parser(config.tool_call_parser)
    tokenizer = serving.tokenizer
    own = tokenizer.chat_template if tokenizer is not None else None
    found = suggest_tool_parser(asked.chat_template or serving.template or own or "")
    if found is None:
        raise _no_auto(f"--tool-call-parser, one of {', '.join(tool_parser_names())}")
    return found


def _no_auto(flag: str) -> ApiError:
    return ApiError(
        f"tool_choice auto, the default with tools, needs a server started with {flag}; without "
        "it, tool_choice is none, required or a function",
        "unsupported_parameter",
        param="tool_choice",
    )


def _call_parser(choice: Choice, auto: ToolParser | None) -> Callable[[NewId], PieceParser]:
    if isinstance(choice, NamedTool):
        form = only(choice.function.name)
        return lambda new_id: CallText(form, new_id)
    if choice == "required":
        return lambda new_id: CallText(REQUIRED, new_id)
    return (lambda _: PlainText()) if auto is None else auto.create


def _reasoning_parser(serving: Serving) -> ReasoningParser | None:
    name = serving.config.reasoning_parser
    return find_reasoning_parser(name) if name else None


def _marks(*parsers: ToolParser | ReasoningParser | None) -> frozenset[str]:
    return frozenset().union(*(parser.marks for parser in parsers if parser is not None))


@lru_cache(maxsize=8)
def _other_texts(specials: frozenset[str], marks: frozenset[str]) -> Marks:
    """Kept from request to request: some models have a thousand special tokens."""
    return Marks(specials - marks)


def _special_texts(serving: Serving) -> frozenset[str]:
    tokenizer = serving.tokenizer
    return frozenset() if tokenizer is None else special_texts(tokenizer)


@lru_cache(maxsize=2)
def special_texts(tokenizer: Tokenizer) -> frozenset[str]:
    """Texts of all special tokens, as they stand in a decoded answer."""
    ids = range(tokenizer.largest_token_id + 1)
    texts = (tokenizer.token_bytes(index) for index in ids if tokenizer.is_special(index))
    return frozenset(text.decode(errors="replace") for text in texts)
