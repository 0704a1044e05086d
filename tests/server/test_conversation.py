"""What a chat template is given, and what of its result is taken."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from heddle.engine.inputs import PromptInput
from heddle.errors import RequestError
from heddle.server import conversation
from heddle.server.config import ServerConfig
from heddle.server.conversation import conversation_prompt
from heddle.server.errors import ApiError
from heddle.server.requests import ChatRequest, TokenizeRequest
from heddle.server.serving import Serving

TURNS = [{"role": "user", "content": "hi"}]


class Templates:
    """A tokenizer that notes what its template is given."""

    def __init__(self, result: str | Exception = "<s>hi") -> None:
        self.given: dict[str, Any] = {}
        self.turns: Any = None
        self.offered: Any = None
        self._result = result

    def apply_chat_template(self, turns: Any, **given: Any) -> str:
        self.turns, self.given = turns, given
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


class Offered(Serving):
    """A server that has a tokenizer and nothing else."""

    def __init__(self, templates: Templates, **settings: Any) -> None:
        super().__init__(ServerConfig(**settings), "toy")
        self._templates = templates
        templates.offered = self

    def need_tokenizer(self) -> Any:
        return self._templates


def prompt(
    templates: Templates,
    settings: dict[str, Any] | None = None,
    *,
    tools: Any = None,
    kind: Any = ChatRequest,
    **fields: Any,
) -> PromptInput:
    asked = msgspec.convert({"messages": TURNS, **fields}, kind)
    return asyncio.run(conversation_prompt(Offered(templates, **(settings or {})), asked, tools))


def test_a_conversation_is_opened_for_the_assistant() -> None:
    templates = Templates()
    found = prompt(templates, cache_salt="s")
    assert (found.text, found.cache_salt) == ("<s>hi", "s")
    assert not found.add_special_tokens, "the template writes them all"
    assert templates.turns == TURNS
    assert templates.given == {
        "chat_template": None,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "tools": None,
        "chat_template_kwargs": {},
        "renderer": templates.offered.templates.render,
    }


@pytest.mark.parametrize(
    ("fields", "opens"),
    [
        ({}, True),
        ({"continue_final_message": True}, False),
        ({"add_generation_prompt": False}, False),
        ({"add_generation_prompt": True, "continue_final_message": False}, True),
    ],
)
def test_a_turn_is_opened_or_gone_on_with(fields: dict[str, bool], opens: bool) -> None:
    templates = Templates()
    prompt(templates, **fields)
    assert templates.given["add_generation_prompt"] is opens
    assert templates.given["continue_final_message"] is bool(fields.get("continue_final_message"))


def test_variables_of_the_request_win_over_the_servers() -> None:
    templates = Templates()
    settings = {"default_chat_template_kwargs": '{"a": 1, "b": 2}'}
    prompt(templates, settings, chat_template_kwargs={"b": 3}, documents=[{"x": "y"}])
    assert templates.given["chat_template_kwargs"] == {"a": 1, "b": 3, "documents": [{"x": "y"}]}


def test_tools_reach_the_template() -> None:
    templates = Templates()
    prompt(templates, tools=[{"type": "function"}])
    assert templates.given["tools"] == [{"type": "function"}]


def test_a_template_of_the_request_needs_trust() -> None:
    with pytest.raises(ApiError, match="--trust-request-chat-template") as caught:
        prompt(Templates(), chat_template="{{ 1 }}")
    assert (caught.value.param, caught.value.code) == ("chat_template", "unsupported_parameter")
    templates = Templates()
    prompt(templates, {"trust_request_chat_template": True}, chat_template="{{ 1 }}")
    assert templates.given["chat_template"] == "{{ 1 }}"
    assert templates.given["renderer"] == templates.offered.templates.render_given


def test_a_template_that_refuses_is_told_with_its_code() -> None:
    refusal = RequestError("the template wants a system turn", "invalid_template_input")
    with pytest.raises(ApiError, match="wants a system turn") as caught:
        prompt(Templates(refusal))
    assert (caught.value.status, caught.value.code) == (400, "invalid_template_input")


def test_a_conversation_has_a_size_when_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "MAX_RENDERED_CHARACTERS", 10)
    assert prompt(Templates("x" * 10)).text == "x" * 10
    with pytest.raises(ApiError, match="has 11 characters; at most 10") as caught:
        prompt(Templates("x" * 11))
    assert caught.value.code == "invalid_template_input"


def test_an_empty_conversation_is_refused_before_any_template_runs() -> None:
    templates = Templates()
    with pytest.raises(ApiError, match="messages is empty"):
        prompt(templates, messages=[])
    assert templates.turns is None


def test_tokens_of_a_conversation_are_counted_by_the_same_rules() -> None:
    templates = Templates()
    found = prompt(templates, kind=TokenizeRequest, add_special_tokens=True)
    assert found.add_special_tokens
    assert found.cache_salt is None
    assert templates.given["add_generation_prompt"] is True
