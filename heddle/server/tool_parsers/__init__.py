"""Formats of tool calls in the text of models, by name.

    parser = find_tool_parser("hermes").create(new_call_id)
    parser.push(text) -> pieces

A format is a table (`call_text.CallFormat`), or any class with the two methods of `PieceParser`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from heddle.errors import ConfigError, quoted
from heddle.server.pieces import PieceParser
from heddle.server.tool_parsers import deepseek_v3, hermes, llama3_json
from heddle.server.tool_parsers.call_text import CallFormat, CallText, NewId, new_call_id

__all__ = [
    "CallFormat",
    "CallText",
    "NewId",
    "ToolParser",
    "find_tool_parser",
    "new_call_id",
    "register_tool_parser",
    "suggest_tool_parser",
    "tool_parser_names",
]

ToolParserFactory = Callable[[NewId], PieceParser]


@dataclass(frozen=True, slots=True)
class ToolParser:
    """A format of tool calls."""

    create: ToolParserFactory
    """Makes the parser of one answer; it takes the maker of ids of calls."""
    marks: frozenset[str]
    """Texts that stand around calls. Where one of them is a special token of the model, special
    tokens are kept for the parser."""
    suits: Callable[[str], bool]
    """A chat template asks for calls in this format."""


_PARSERS: dict[str, ToolParser] = {}


def register_tool_parser(
    name: str,
    create: ToolParserFactory,
    *,
    marks: Collection[str] = (),
    suits: Callable[[str], bool] = lambda _: False,
) -> None:
    """Add a format, before the server starts.

    Args:
        name: for `--tool-call-parser`.
        create: makes the parser of one answer; it takes the maker of ids of calls.
        marks: texts that stand around calls; special tokens among them are not dropped.
        suits: says of a chat template whether it asks for such calls; asked only where no parser
            is named.
    Raises:
        ConfigError: the name is taken.
    """
    if name in _PARSERS:
        raise ConfigError(f"tool parser {name!r} is registered already; choose another name")
    _PARSERS[name] = ToolParser(create, frozenset(marks), suits)


def tool_parser_names() -> tuple[str, ...]:
    """Names that `--tool-call-parser` may give, in the order of registration."""
    return tuple(_PARSERS)


def find_tool_parser(name: str) -> ToolParser:
    """The format of this name.

    Raises:
        ConfigError: nobody has it; lists those that are there.
    """
    if name not in _PARSERS:
        raise ConfigError(
            f"tool_call_parser={quoted(name)} is not known; legal here: {', '.join(_PARSERS)}"
        )
    return _PARSERS[name]


def suggest_tool_parser(template: str) -> ToolParser | None:
    """The first format that a chat template asks for; None: it asks for none that is known."""
    return next((parser for parser in _PARSERS.values() if parser.suits(template)), None)


def _register(name: str, form: CallFormat, suits: Callable[[str], bool]) -> None:
    register_tool_parser(name, lambda new_id: CallText(form, new_id), marks=form.texts, suits=suits)


_register("hermes", hermes.HERMES, hermes.suits)
_register("llama3_json", llama3_json.LLAMA3_JSON, llama3_json.suits)
_register("deepseek_v3", deepseek_v3.DEEPSEEK_V3, deepseek_v3.suits)
