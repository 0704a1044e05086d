from __future__ import annotations

import pytest

from heddle.engine.chat_template import ChatTemplate, Conversation
from heddle.errors import RequestError
from tests.support.byte_tokenizer import TEMPLATE

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so "}]


def render(source: str, messages: object = TURNS, **options: object) -> str:
    conversation = Conversation(messages=messages, **options)  # type: ignore[arg-type]
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(conversation)


def test_turns_and_generation_prompt() -> None:
    opened = render(TEMPLATE)
    assert (
        opened == "<|start|>user\nhi<|end|>\n<|start|>assistant\nso <|end|>\n<|start|>assistant\n"
    )
    closed = render(TEMPLATE, add_generation_prompt=False)
    assert closed == "<|start|>user\nhi<|end|>\n<|start|>assistant\nso <|end|>\n"


def test_final_message_is_continued_where_it_ends() -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(TEMPLATE, **options) == "<|start|>user\nhi<|end|>\n<|start|>assistant\nso "
    with pytest.raises(RequestError, match="both true"):
        render(TEMPLATE, continue_final_message=True)
    with pytest.raises(RequestError, match="does not show the last message"):
        render("{{ messages[0].content }}", **options)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{% if true %}\n  {% set x = 1 %}\nx\n{% endif %}\n", "x\n"),  # trim and lstrip blocks
        ("{{ {'a': ['<', '\u20ac']} | tojson }}", '{"a": ["<", "\u20ac"]}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{% for i in range(9) %}{% if i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ name }}", "x"),
    ],
)
def test_what_templates_rely_on(source: str, expected: str) -> None:
    assert render(source, extra={"name": "x"}) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system role') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ missing.attribute }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].role + 1 }}",
    ],
)
def test_template_that_refuses_or_reaches_out_is_a_request_error(source: str) -> None:
    with pytest.raises(RequestError, match="the chat template refuses") as caught:
        render(source)
    assert caught.value.code == "invalid_template_input"


def test_reason_of_the_template_is_told() -> None:
    with pytest.raises(RequestError, match="no system role"):
        render("{{ raise_exception('no system role') }}")
    with pytest.raises(RequestError, match="cannot be read"):
        ChatTemplate("{% if %}", {})


def test_text_parts_are_joined_and_nulls_left_out() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts, "name": None}]
    assert render("{{ messages[0].content }}{{ 'name' in messages[0] }}", messages) == "abFalse"
    calls = [{"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}]
    assert render("[{{ messages[0].content }}]{{ messages[0].tool_calls[0].id }}", calls) == "[]1"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        (["hi"], "a mapping with a role"),
        ([{"content": "hi"}], "'role' of a message is text, not None"),
        ([{"role": 1, "content": "hi"}], "'role' of a message is text, not 1"),
        ([{"role": "user", "content": 3}], "a string, a list of text parts"),
        ([{"role": "user", "content": [{"type": "image_url", "url": "x"}]}], "only text parts"),
        ([{"role": "user", "content": "x", "extra": object()}], "cannot be passed"),
    ],
)
def test_what_is_no_conversation_is_refused(messages: list[object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render(TEMPLATE, messages)


def test_templates_see_plain_data_only() -> None:
    class Loud(str):
        def shout(self) -> str:
            return self.upper()

    with pytest.raises(RequestError, match="refuses"):
        render("{{ messages[0].content.shout() }}", [{"role": "user", "content": Loud("a")}])


def test_a_text_has_a_length_where_one_is_set() -> None:
    template = ChatTemplate("{% for i in range(100) %}abcd{% endfor %}", {})
    conversation = Conversation(messages=TURNS)
    assert len(template.render(conversation, 400)) == 400
    with pytest.raises(RequestError, match="more than 399 characters") as caught:
        template.render(conversation, 399)
    assert caught.value.code == "invalid_template_input"
