from __future__ import annotations

import json
import random
from typing import Any

import pytest

from heddle.engine.grammar.source import lark_text
from tests.support.grammars import BOTH, EOS, describe, ids_of, walk


def accepts(text: str, **fields: Any) -> bool:
    """Whether a whole text follows a description."""
    tokenizer, compiler = BOTH["bytes"]
    matcher = compiler.compile(describe(**fields)).start((EOS,))
    for token_id in tokenizer.encode(text):
        if token_id not in ids_of(matcher.mask()):
            return False
        matcher.accept(token_id)
    return matcher.is_done or EOS in ids_of(matcher.mask())


NASTY = ['a"b', "a\\b", "a\nb\t\x00", "\u00e9\U0001f600", "/*", "{", "%json", "a\u2028", "'", "//x"]


@pytest.mark.parametrize("text", NASTY, ids=repr)
def test_choices_are_taken_letter_by_letter(text: str) -> None:
    assert accepts(text, choice=[text, "other"])
    assert not accepts(text[:-1], choice=[text, "other"])


@pytest.mark.parametrize(
    ("regex", "text"),
    [
        ("a/b", "a/b"),
        (r"a\/b", "a/b"),
        ("a\nb", "a\nb"),
        (r"a\nb", "a\nb"),
        ("^ab$", "ab"),
        (r'"\d+"', '"12"'),
        ("[/]+", "//"),
        ("a#b // c", "a#b // c"),
        (r"\x41\u00e9", "A\u00e9"),
        ("(?i)ab", "aB"),
    ],
    ids=repr,
)
def test_expressions_match_the_whole_text(regex: str, text: str) -> None:
    assert accepts(text, regex=regex)
    assert not accepts(f"{text}~", regex=regex)


def test_json_may_be_indented_but_not_filled_with_blanks() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array"}}}
    value = {"a": [1, {"b": None}, "c"]}
    for text in (json.dumps(value), json.dumps(value, indent=8), '{"a":[]}'):
        assert accepts(text, json=schema)
    assert accepts("{" + " " * 64 + "}", json=schema)
    assert not accepts("{" + " " * 65 + "}", json=schema)


def test_keys_come_in_the_order_of_the_schema() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}
    assert accepts('{"b": null, "a": null}', json=schema)
    assert not accepts('{"a": null, "b": null}', json=schema)


def test_any_object_but_no_other_value_is_a_json_object() -> None:
    assert accepts('{"a": [1.5e3, true, {"b": ""}]}', json_object=True)
    assert not accepts("[]", json_object=True)
    assert not accepts("1", json_object=True)


def test_options_of_a_schema_hold_unless_they_permit_too_much() -> None:
    schema = {"type": "array", "x-guidance": {"whitespace_pattern": "", "lenient": True}}
    assert accepts("[1,2]", json=schema)
    assert not accepts("[1, 2]", json=schema)
    assert '"lenient": false' in lark_text(describe(json=schema))


@pytest.mark.parametrize(
    "source",
    ['start: A+ "!"\nA: "a" | "b"', 'root ::= a+ "!"\na ::= "a" | "b"'],
    ids=["lark", "gbnf"],
)
def test_grammars_come_in_two_notations(source: str) -> None:
    assert accepts("abba!", grammar=source)
    assert not accepts("abba", grammar=source)
    assert not accepts("!", grammar=source)


def test_a_lark_grammar_may_speak_of_gbnf() -> None:
    assert accepts("a ::= b", grammar='start: NAME " ::= " NAME\nNAME: /[a-z]/')


def test_no_grammar_can_have_tokens_forced() -> None:
    """Where the text is forced, every spelling of it stays open."""
    tokenizer, compiler = BOTH["bytes"]
    source = '%llguidance {"no_forcing": false}\nstart: "the end"'
    matcher = compiler.compile(describe(grammar=source)).start()
    first = {tokenizer.token_bytes(id_) for id_ in ids_of(matcher.mask())}
    assert first == {b"t", b"th", b"the"}
    assert tokenizer.decode(walk(matcher, random.Random(0), 20)) == "the end"
