"""A template that runs away ends its helper, in time, and the next conversation is rendered."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from heddle.engine import template_helper
from heddle.engine.chat_template import ChatTemplate, Conversation
from heddle.engine.helper_process import Limits
from heddle.engine.template_helper import TemplateHelpers
from heddle.errors import RequestError
from tests.support.byte_tokenizer import TEMPLATE
from tests.support.processes import LONG_SECONDS, seconds_until

TOKENS = {"bos_token": "<s>"}
TALK = Conversation(
    messages=[{"role": "user", "content": "hi \u20ac"}], extra={"k": [1, 2.5, None]}
)
SECONDS = 1.0

LOOPS = {
    "nested loops": "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "a loop that fills the text": "{% for a in range(99999) %}{{ 'x' * 999 }}{% endfor %}",
    "a power that the compiler works out": "{{ 9 ** (9 ** 9) }}",
    "a sort of its own making": "{% for a in range(99999) %}{{ range(99999) | list | sort }}"
    "{% endfor %}",
}
MEMORY = {
    "a long text": "{{ 'x' * 10 ** 9 }}",
    "a list of lists": "{{ ([[0] * 99999] * 99999) | string }}",
    "a text that doubles": "{% set n = namespace(t='x') %}{% for a in range(64) %}"
    "{% set n.t = n.t ~ n.t %}{% endfor %}",
}
RECURSION = {
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "very many brackets": "{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}",
    "very many blocks": "{% if true %}" * 999 + "{% endif %}" * 999,
}
ESCAPES = {
    "a class of text": "{{ ''.__class__.__mro__ }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "globals by a filter": "{{ raise_exception | attr('__globals__') }}",
    "a format that walks": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "a loop's own frame": "{% for a in [1] %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "the template itself": "{{ self.__init__.__globals__['__builtins__'] }}",
    "a generator's frame": "{{ (messages | map('upper')).gi_frame.f_globals }}",
    "another file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}{{ os }}",
}


@pytest.fixture(scope="module")
def helpers() -> Iterator[TemplateHelpers]:
    made = TemplateHelpers(Limits(seconds=SECONDS, memory_bytes=128 << 20))
    made.render("x", {}, TALK)
    yield made
    made.close()


def refusal(helpers: TemplateHelpers, source: str, talk: Conversation = TALK) -> str:
    with pytest.raises(RequestError) as caught:
        helpers.render(source, TOKENS, talk)
    assert caught.value.code == "invalid_template_input"
    return str(caught.value)


def test_a_helper_renders_as_this_process_would(helpers: TemplateHelpers) -> None:
    source = TEMPLATE + "{{ bos_token }}{{ k | tojson }}{{ tools | tojson }}"
    for talk in (
        TALK,
        Conversation(messages=TALK.messages, tools=[{"a": {"b": "c"}}], extra={"k": 0}),
    ):
        expected = ChatTemplate(source, TOKENS).render(talk)
        assert helpers.render(source, TOKENS, talk) == expected
        assert helpers.render_given(source, TOKENS, talk) == expected


@pytest.mark.parametrize("name", [*LOOPS, *MEMORY, *RECURSION])
def test_what_runs_away_is_refused_in_time(helpers: TemplateHelpers, name: str) -> None:
    began = time.monotonic()
    words = refusal(helpers, {**LOOPS, **MEMORY, **RECURSION}[name])
    print(f"{name}: {words[:100]} after {time.monotonic() - began:.2f} s")
    assert time.monotonic() - began < LONG_SECONDS / 2
    assert helpers.render("{{ messages[0].role }}", TOKENS, TALK) == "user"


@pytest.mark.parametrize("name", ESCAPES)
def test_nothing_is_reached_from_a_template(helpers: TemplateHelpers, name: str) -> None:
    try:
        found = helpers.render(ESCAPES[name], TOKENS, TALK)
    except RequestError as error:
        found = str(error)
        assert re.search("unsafe|undefined|no loader", found), found
    else:
        assert found == ""


def test_a_text_may_be_longer_than_what_it_is_made_of_and_not_much(
    helpers: TemplateHelpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = "{% for a in range(" + "N" + ") %}{{ 'x' * 1024 }}{% endfor %}"
    assert len(helpers.render(piece.replace("N", "1024"), {}, TALK)) == 1 << 20
    assert "characters of this conversation" in refusal(helpers, piece.replace("N", "1026"))
    long = Conversation(messages=[{"role": "user", "content": "y" * (1 << 20)}])
    assert len(helpers.render("{{ messages[0].content * 5 }}", {}, long)) == 5 << 20


@pytest.mark.parametrize(
    ("value", "words"),
    [(2**70, "cannot be passed"), (object(), "cannot be passed"), ("\ud800", "cannot be passed")],
)
def test_what_cannot_travel_is_refused(helpers: TemplateHelpers, value: Any, words: str) -> None:
    assert words in refusal(helpers, "x", Conversation(messages=TALK.messages, extra={"a": value}))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, "cannot be read: too many statically"),
        ("{% break %}", "cannot be read: 'break' outside loop"),
        ("{{ 1e999 | int }}", "refuses these messages: name 'inf'"),
        ("{{ 10 ** 5000 }}", "cannot be read: Exceeds the limit"),
        ("{{ k | xmlattr }}", "refuses these messages: 'list' object has no attribute"),
    ],
    ids=["nested too far", "a stray word", "an endless number", "a long number", "a wrong type"],
)
def test_whatever_a_template_raises_is_a_refusal_in_words(
    helpers: TemplateHelpers, template: str, words: str
) -> None:
    """It is not told as if it had taken too much, and the helper goes on."""
    helpers.render("warm", TOKENS, TALK)
    before = list(helpers._own._idle)
    with pytest.raises(RequestError, match=words):
        helpers.render(template, TOKENS, TALK)
    assert helpers._own._idle == before
    assert all(helper.is_alive for helper in before)


@pytest.mark.parametrize("template", ["{{ '\\ud800' }}", "{{ raise_exception('\\udfff') }}"])
def test_half_a_character_is_refused_and_its_helper_lives(
    helpers: TemplateHelpers, template: str
) -> None:
    helpers.render("warm", TOKENS, TALK)
    before = list(helpers._own._idle)
    assert before
    with pytest.raises(RequestError, match=r"half a character \(a surrogate\)"):
        helpers.render(template, TOKENS, TALK)
    assert helpers._own._idle == before
    assert all(helper.is_alive for helper in before)


def test_a_refusal_keeps_its_words_and_code(helpers: TemplateHelpers) -> None:
    assert "no system role" in refusal(helpers, "{{ raise_exception('no system role') }}")
    assert "cannot be read" in refusal(helpers, "{% if %}")
    with pytest.raises(RequestError, match="only text parts") as caught:
        helpers.render("x", {}, Conversation(messages=[{"role": "user", "content": [{"a": 1}]}]))
    assert caught.value.code == "unsupported_content"


def test_a_helper_that_was_killed_while_idle_is_replaced() -> None:
    helpers = TemplateHelpers(Limits(seconds=LONG_SECONDS))
    assert helpers.render("x", {}, TALK) == "x"
    (victim,) = helpers._own._idle
    victim._process.kill()
    assert seconds_until(lambda: not victim.is_alive) < LONG_SECONDS
    assert helpers.render("y", {}, TALK) == "y"
    (successor,) = helpers._own._idle
    assert successor.is_alive
    helpers.close()


def test_templates_of_requests_hold_up_no_others() -> None:
    helpers = TemplateHelpers(Limits(seconds=LONG_SECONDS))
    own = helpers._own
    assert helpers._given is not own
    with helpers._given._seats:  # its only seat is taken
        assert helpers.render("x", {}, TALK) == "x"
    assert own._seats._value == template_helper.NUM_HELPERS  # type: ignore[attr-defined]
    helpers.close()
    helpers.close()
    assert own._idle == []


def test_a_warm_helper_is_the_one_that_renders() -> None:
    helpers = TemplateHelpers()
    helpers.warm()
    (first,) = helpers._own._idle
    helpers.render("x", {}, TALK)
    assert helpers._own._idle == [first]
    assert helpers._given._idle == []
    helpers.close()


def test_a_helper_has_no_key_and_writes_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEDDLE_API_KEY", "a-secret-key")
    monkeypatch.setenv("HF_TOKEN", "a-secret-token")
    helpers = TemplateHelpers()
    helpers.render("x", {}, TALK)
    (helper,) = helpers._own._idle
    process = Path(f"/proc/{helper._process.pid}")
    for name in ("environ", "cmdline"):
        assert b"PATH" in (process / "environ").read_bytes()
        assert b"a-secret" not in (process / name).read_bytes()
    limits = (process / "limits").read_text()
    assert limits.count("Max file size             0") == 1
    assert limits.count("Max core file size        0") == 1
    helpers.close()
