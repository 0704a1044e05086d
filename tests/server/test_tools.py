"""What becomes of the tools of a request: shown, required, read, or refused with the remedy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import llguidance
import msgspec
import pytest

from heddle.config.structured import StructuredOutputsParams
from heddle.engine.grammar.source import lark_text
from heddle.engine.tokenizer import Tokenizer
from heddle.errors import ConfigError
from heddle.server.config import ServerConfig
from heddle.server.errors import ApiError
from heddle.server.pieces import CallArguments, CallBegins, Content, Reasoning
from heddle.server.requests import ChatRequest, StructuredOutputs
from heddle.server.tool_parsers.forced import calls_schema
from heddle.server.tools import MAX_TOOLS, ToolUse, check_parser_names, plan_tools, special_texts
from tests.support import byte_tokenizer
from tests.support.pieces import parse

HERMES_TEMPLATE = '<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>'
SEARCH = {
    "name": "search",
    "description": "in the archive",
    "parameters": {
        "type": "object",
        "properties": {"query": {"$ref": "#/$defs/text"}},
        "required": ["query"],
        "$defs": {"text": {"type": "string"}},
    },
}
NOW = {"name": "now"}
TOOLS = [{"type": "function", "function": function} for function in (SEARCH, NOW)]
NAMED = {"type": "function", "function": {"name": "search"}}
AUTO = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
CALL = '<tool_call>{"name": "search", "arguments": {"query": "loom"}}</tool_call>'
FOUND = [(0, "search"), CallArguments(0, '{"query": "loom"}')]


class FewTokens:
    """A tokenizer of whole marks."""

    def __init__(self, *specials: str, template: str | None = None) -> None:
        self.chat_template = template
        self._specials = ("text", *specials)

    @property
    def largest_token_id(self) -> int:
        return len(self._specials) - 1

    def is_special(self, token_id: int) -> bool:
        return token_id > 0

    def token_bytes(self, token_id: int) -> bytes:
        return self._specials[token_id].encode()


def plan(
    *specials: str, config: dict[str, Any] | None = None, template: str = "", **fields: Any
) -> ToolUse:
    body = {"messages": [{"role": "user", "content": "hello"}], **fields}
    serving: Any = SimpleNamespace(
        config=ServerConfig(**(config or {})),
        template=None,
        tokenizer=FewTokens(*specials, template=template),
    )
    return plan_tools(msgspec.convert(body, ChatRequest), serving)


def read(use: ToolUse, *parts: str, prompt: str = "") -> list[Any]:
    """Pieces of an answer; ids, which are random, are left out."""
    return [
        (piece.index, piece.name) if isinstance(piece, CallBegins) else piece
        for piece in parse(use.new_parser(prompt), *parts)
    ]


def test_without_tools_an_answer_is_content() -> None:
    use = plan()
    assert (use.shown, use.grammar, use.keeps_special_tokens) == (None, None, False)
    assert read(use, CALL) == [Content(CALL)]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": []}, "tools", "0 entries; must be 1 to 128"),
        ({"tools": TOOLS * 65}, "tools", "130 entries; must be 1 to 128"),
        ({"tool_choice": "auto"}, "tool_choice", "needs tools"),
        ({"tool_choice": "none"}, "tool_choice", "needs tools"),
        ({"tool_choice": NAMED}, "tool_choice", "needs tools"),
        (
            {"tools": TOOLS, "tool_choice": {"function": {"name": "find"}}},
            "tool_choice.function.name",
            "none of the tools",
        ),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools.1.function.name", "an earlier tool"),
        (
            {"tools": [TOOLS[0], {"function": {"name": "a.b"}}]},
            "tools.1.function.name",
            "1 to 64 letters",
        ),
        ({"tools": [{"function": {"name": "a" * 65}}]}, "tools.0.function.name", "1 to 64 letters"),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"type": "string"}}}]},
            "tools.0.function.parameters.type",
            "has to be object",
        ),
        (
            {"tools": TOOLS, "tool_choice": NAMED, "response_format": {"type": "json_object"}},
            "response_format",
            "two forms of one answer",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "two forms of one answer",
        ),
    ],
)
def test_what_is_not_legal_is_refused_at_its_place(
    fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        plan(config=AUTO, **fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_as_many_tools_as_are_legal() -> None:
    tools = [{"function": {"name": f"f_{number}-"}} for number in range(MAX_TOOLS)]
    use = plan(tools=tools, tool_choice="required")
    assert use.shown is not None
    assert len(use.shown) == MAX_TOOLS
    assert use.grammar is not None
    assert StructuredOutputsParams(json=use.grammar.json).kind == "json"


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}])
def test_auto_names_the_flag_that_is_missing(choice: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="started with --enable-auto-tool-choice; ") as caught:
        plan(tools=TOOLS, **choice)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "tool_choice")
    with pytest.raises(ApiError, match="--tool-call-parser, one of hermes, llama3_json, deepseek"):
        plan(config={"enable_auto_tool_choice": True}, template="plain", tools=TOOLS, **choice)


@pytest.mark.parametrize(
    ("config", "template"), [(AUTO, ""), ({"enable_auto_tool_choice": True}, HERMES_TEMPLATE)]
)
def test_auto_reads_calls_in_the_models_format(config: dict[str, Any], template: str) -> None:
    use = plan(config=config, template=template, tools=TOOLS)
    assert use.shown == TOOLS
    assert (use.grammar, use.call_reason) == (None, "tool_calls")
    assert read(use, *f"I look.\n{CALL}") == [Content("I look."), *FOUND]
    one, other = (use.new_parser().push(CALL)[0] for _ in range(2))
    assert isinstance(one, CallBegins)
    assert isinstance(other, CallBegins)
    assert one.id != other.id


def test_none_shows_no_tools_and_reads_no_calls() -> None:
    use = plan(config=AUTO, tools=TOOLS, tool_choice="none")
    assert (use.shown, use.grammar) == (None, None)
    assert read(use, CALL) == [Content(CALL)]


def test_an_answer_of_a_given_form_is_content() -> None:
    config = {"enable_auto_tool_choice": True, "tool_call_parser": "llama3_json"}
    text = '{"name": "search", "parameters": {}}'
    free = plan(config=config, tools=TOOLS)
    formed = plan(config=config, tools=TOOLS, response_format={"type": "json_object"})
    assert read(free, text) == [(0, "search"), CallArguments(0, "{}")]
    assert read(formed, text) == [Content(text)]
    assert formed.shown == TOOLS


@pytest.mark.parametrize(("parallel", "most"), [(None, None), (True, None), (False, 1)])
def test_required_answers_follow_a_list_of_calls(parallel: bool | None, most: int | None) -> None:
    use = plan(tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel)
    no_parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    functions = [("search", SEARCH["parameters"]), ("now", no_parameters)]
    assert use.grammar == StructuredOutputs(json=calls_schema(functions, most))
    assert (use.shown, use.call_reason) == (TOOLS, "tool_calls")
    text = (
        '[{"name": "search", "parameters": {"query": "loom"}}, {"name": "now", "parameters": {}}]'
    )
    second = [] if parallel is False else [(1, "now"), CallArguments(1, "{}")]
    assert read(use, *text) == FOUND + second


def test_the_schema_of_required_calls_is_a_grammar_of_them() -> None:
    use = plan(tools=TOOLS, tool_choice="required")
    assert use.grammar is not None
    text = lark_text(StructuredOutputsParams(json=use.grammar.json))

    def legal(answer: str) -> int:
        """Bytes of the longest legal beginning."""
        matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), text)
        return int(matcher.validate_tokens(list(answer.encode())))

    good = (
        '[{"name": "search", "parameters": {"query": "loom"}}, {"name": "now", "parameters": {}}]'
    )
    assert legal(good) == len(good)
    assert legal("[]") == 1
    for bad in (3, '{"query": "x"}'):
        answer = f'[{{"name": "search", "parameters": {{"query": {bad}'
        assert legal(answer) == answer.index('"query": ') + len('"query": ')
    assert legal('[{"name": "find"') == len('[{"name": "')


def test_a_named_function_gets_the_answer_as_its_arguments() -> None:
    use = plan(tools=TOOLS, tool_choice=NAMED)
    assert use.grammar == StructuredOutputs(json=SEARCH["parameters"])
    assert (use.shown, use.call_reason) == (TOOLS, "stop")
    assert read(use, *'{"query": "loom"}') == FOUND
    use = plan(tools=TOOLS, tool_choice={"function": {"name": "now"}})
    assert use.grammar is not None
    assert use.grammar.json == {"type": "object", "properties": {}, "additionalProperties": False}


def test_references_lead_to_where_a_schema_was_put() -> None:
    tree = {
        "type": "object",
        "properties": {
            "next": {"$ref": "#"},
            "leaf": {"$ref": "#/$defs/leaf"},
            "$ref": {"const": {"$ref": "#/data"}},
            "enum": {"$ref": "#/$defs/leaf"},
            "properties": {"$ref": "#"},
            "else": {"$ref": "other.json"},
        },
        "$defs": {"leaf": {"enum": [{"$ref": "#"}]}},
    }
    schema = calls_schema([("f", {"type": "object"}), ("g", tree)], most=None)
    assert (schema["type"], schema["minItems"], "maxItems" in schema) == ("array", 1, False)
    first, second = schema["items"]["anyOf"]
    assert first["properties"] == {"name": {"enum": ["f"]}, "parameters": {"type": "object"}}
    assert first["required"] == ["name", "parameters"]
    place = "#/items/anyOf/1/properties/parameters"
    moved = second["properties"]["parameters"]
    assert moved["properties"] == {
        "next": {"$ref": place},
        "leaf": {"$ref": f"{place}/$defs/leaf"},
        "$ref": {"const": {"$ref": "#/data"}},
        "enum": {"$ref": f"{place}/$defs/leaf"},
        "properties": {"$ref": place},
        "else": {"$ref": "other.json"},
    }
    assert moved["$defs"] == tree["$defs"]
    assert calls_schema([("f", {})], most=1)["maxItems"] == 1


def test_one_call_where_calls_are_not_parallel() -> None:
    use = plan(config=AUTO, tools=TOOLS, parallel_tool_calls=False)
    assert read(use, *(CALL + CALL)) == FOUND


REASONS = {"reasoning_parser": "qwen3"}


def test_reasoning_comes_before_calls() -> None:
    use = plan(config=AUTO | REASONS, tools=TOOLS)
    assert read(use, f"<think>warp</think>{CALL}") == [Reasoning("warp"), *FOUND]
    assert read(use, f"warp</think>{CALL}", prompt="<think>\n") == [Reasoning("warp"), *FOUND]
    plain = plan(config=REASONS)
    assert read(plain, "<think>warp</think>weft") == [Reasoning("warp"), Content("weft")]
    silent = plan(config=REASONS, include_reasoning=False)
    assert read(silent, "<think>warp</think>weft") == [Content("weft")]


@pytest.mark.parametrize(
    "fields", [{"tools": TOOLS, "tool_choice": NAMED}, {"structured_outputs": {"regex": ".*"}}]
)
def test_an_answer_that_follows_a_grammar_has_no_reasoning(fields: dict[str, Any]) -> None:
    use = plan(config={"reasoning_parser": "deepseek_r1"}, **fields)
    (*_, last) = read(use, '{"a": "</think>"}', prompt="<think>")
    assert last in (CallArguments(0, '{"a": "</think>"}'), Content('{"a": "</think>"}'))


SPECIALS = ("<tool_call>", "</tool_call>", "<|im_end|>", "<s>")


def test_special_tokens_are_kept_for_marks_alone() -> None:
    use = plan(*SPECIALS, config=AUTO, tools=TOOLS)
    assert use.keeps_special_tokens
    text = f"<s>a < b <s{CALL}<|im_end|>"
    assert read(use, *text) == read(use, text) == [Content("a < b <s"), *FOUND]
    asked = plan(*SPECIALS, config=AUTO, tools=TOOLS, skip_special_tokens=False)
    assert read(asked, *text) == [Content("<s>a < b <s"), *FOUND, Content("<|im_end|>")]


def test_special_texts_are_those_of_the_tokenizer() -> None:
    byte_level = Tokenizer(byte_tokenizer.byte_level(), special_tokens={}, chat_template=None)
    assert special_texts(byte_level) == set(byte_tokenizer.SPECIAL)
    spaced = Tokenizer(byte_tokenizer.space_marked(), special_tokens={}, chat_template=None)
    assert special_texts(spaced) == {"<unk>", "<s>", "</s>"}


@pytest.mark.parametrize(
    ("config", "fields", "keeps"),
    [
        (AUTO, {"tools": TOOLS, "tool_choice": "none"}, False),
        (AUTO, {"tools": TOOLS, "tool_choice": "required"}, False),
        (AUTO | {"tool_call_parser": "llama3_json"}, {"tools": TOOLS}, False),
        (AUTO, {"tools": TOOLS, "response_format": {"type": "json_object"}}, False),
        (AUTO, {"tools": TOOLS}, True),
        (REASONS, {}, False),
    ],
)
def test_special_tokens_are_kept_only_where_a_mark_is_one(
    config: dict[str, Any], fields: dict[str, Any], keeps: bool
) -> None:
    assert plan(*SPECIALS, config=config, **fields).keeps_special_tokens is keeps
    assert not plan("<s>", config=config, **fields).keeps_special_tokens
    assert plan("</think>", config=config, **fields).keeps_special_tokens is (config == REASONS)


def test_names_of_parsers_are_checked_at_the_start() -> None:
    check_parser_names(ServerConfig())
    check_parser_names(
        ServerConfig(
            enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3"
        )
    )
    with pytest.raises(
        ConfigError, match="tool_call_parser='pythonic' is not known; legal here: h"
    ):
        check_parser_names(ServerConfig(enable_auto_tool_choice=True, tool_call_parser="pythonic"))
    with pytest.raises(ConfigError, match="reasoning_parser='qwen2' is not known; legal here: d"):
        check_parser_names(ServerConfig(reasoning_parser="qwen2"))
