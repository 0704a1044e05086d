from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.engine.grammar import compiler as compiler_module
from tests.support.grammars import BOTH, EOS, create, describe, ids_of, walk

TEXTS = st.text("ab the\u20ac\u00e9", min_size=1, max_size=6)


@pytest.mark.parametrize("kind", BOTH)
@settings(max_examples=40)
@given(st.lists(TEXTS, min_size=1, max_size=5), st.integers(0, 2**32))
def test_exactly_the_tokens_that_keep_the_text_a_beginning_are_permitted(
    kind: str, choices: list[str], seed: int
) -> None:
    tokenizer, compiler = BOTH[kind]
    texts = [choice.encode() for choice in choices]
    matcher = compiler.compile(describe(choice=choices)).start((EOS,))
    rng, drawn, text = random.Random(seed), [], b""
    while True:
        expected = {EOS} if text in texts else set()
        for token_id in range(tokenizer.vocab_size):
            data = tokenizer.token_bytes(token_id)
            if not data or tokenizer.is_special(token_id):
                continue
            if not drawn and tokenizer.strips_first_space and data.startswith(b" "):
                data = data[1:]
            if any(found.startswith(text + data) for found in texts):
                expected.add(token_id)
        is_done = text in texts and expected == {EOS}
        assert matcher.is_done == is_done
        assert not matcher.is_stuck
        assert set(ids_of(matcher.mask())) == expected
        if is_done:
            break
        drawn.append(rng.choice(sorted(expected - {EOS})))
        matcher.accept(drawn[-1])
        data = tokenizer.token_bytes(drawn[-1])
        is_stripped = len(drawn) == 1 and tokenizer.strips_first_space and data.startswith(b" ")
        text += data[1:] if is_stripped else data
    assert tokenizer.decode(drawn) in choices


ATOMS = st.sampled_from(["a", "b", "[a-c]", "[^a]", r"\d", " ", "\u20ac", r"\.", "(ab|the)"])
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        inner.map(lambda e: f"({e})?"),
        inner.map(lambda e: f"({e}){{1,3}}"),
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("kind", BOTH)
@settings(max_examples=40)
@given(EXPRESSIONS, st.integers(0, 2**32))
def test_a_walk_ends_in_a_text_that_the_expression_matches(
    kind: str, expression: str, seed: int
) -> None:
    tokenizer, compiler = BOTH[kind]
    matcher = compiler.compile(describe(regex=f"x{expression}")).start((EOS,))
    text = tokenizer.decode(walk(matcher, random.Random(seed), 400))
    assert matcher.is_done
    assert re.fullmatch(f"x{expression}", text)


LEAVES = st.sampled_from(
    [
        {"type": "integer"},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -5, "maximum": 17},
        {"enum": ["red", 7, None, {"a": [1]}]},
        {"type": "string", "maxLength": 5},
        {"type": "string", "pattern": "^[a-f]{2,4}$"},
    ]
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, st.integers(0, 2)).map(
            lambda pair: {"type": "array", "items": pair[0], "minItems": pair[1], "maxItems": 3}
        ),
        st.dictionaries(st.sampled_from(["a", "the b", "\u20ac"]), inner, min_size=1).map(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties)[:2],
                "additionalProperties": False,
            }
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=5,
)


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """Of the keywords above; type is looked at first."""
    if "anyOf" in schema:
        return any(is_valid(value, option) for option in schema["anyOf"])
    if "enum" in schema:
        return any(type(value) is type(entry) and value == entry for entry in schema["enum"])
    if schema["type"] == "null":
        return value is None
    if schema["type"] == "boolean":
        return isinstance(value, bool)
    if schema["type"] == "integer":
        low, high = schema.get("minimum", -(10**99)), schema.get("maximum", 10**99)
        is_whole = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_whole and float(value).is_integer() and low <= value <= high
    if schema["type"] == "string":
        is_short = isinstance(value, str) and len(value) <= schema.get("maxLength", 99)
        return is_short and re.search(schema.get("pattern", ""), value) is not None
    if schema["type"] == "array":
        is_long = isinstance(value, list) and schema["minItems"] <= len(value) <= 3
        return is_long and all(is_valid(item, schema["items"]) for item in value)
    known = schema["properties"]
    return (
        isinstance(value, dict)
        and set(schema["required"]) <= set(value) <= set(known)
        and all(is_valid(item, known[key]) for key, item in value.items())
    )


@pytest.mark.parametrize("kind", BOTH)
@settings(max_examples=40)
@given(SCHEMAS, st.integers(0, 2**32))
def test_a_walk_ends_in_json_that_the_schema_holds_for(
    kind: str, schema: dict[str, Any], seed: int
) -> None:
    tokenizer, compiler = BOTH[kind]
    matcher = compiler.compile(describe(json=schema)).start((EOS,))
    short = [bytes([byte]) for byte in b'"}],:']
    ends = frozenset(
        id_ for id_ in range(tokenizer.vocab_size) if tokenizer.token_bytes(id_) in short
    )
    text = tokenizer.decode(walk(matcher, random.Random(seed), 3000, ends | {EOS}))
    assert matcher.is_done
    assert is_valid(json.loads(text), schema), text


def test_the_end_is_permitted_exactly_where_the_text_is_legal() -> None:
    tokenizer, compiler = BOTH["bytes"]
    grammar = compiler.compile(describe(regex="(ab)+"))
    matcher = grammar.start((EOS,))
    a, b = (tokenizer.encode(letter)[0] for letter in "ab")
    for token_id, may_end in ((a, False), (b, True), (a, False), (b, True)):
        matcher.accept(token_id)
        assert (EOS in ids_of(matcher.mask())) == may_end
    assert not matcher.is_done
    matcher.accept(EOS)
    assert matcher.is_done
    assert not ids_of(matcher.mask())
    assert ids_of(grammar.start().mask()) == [a]


def test_a_text_that_can_grow_no_further_is_done_without_an_end_token() -> None:
    tokenizer, compiler = BOTH["bytes"]
    matcher = compiler.compile(describe(choice=["the"])).start((EOS,))
    for token_id in tokenizer.encode("the"):
        assert not matcher.is_done
        matcher.accept(token_id)
    assert matcher.is_done
    assert ids_of(matcher.mask()) == [EOS]


def test_stop_ids_end_a_legal_text_only_if_they_are_no_text() -> None:
    tokenizer, compiler = BOTH["bytes"]
    a, b = (tokenizer.encode(letter)[0] for letter in "ab")
    special, padding = 2, tokenizer.vocab_size + 3
    matcher = compiler.compile(describe(regex="a+")).start((), (special, padding, b))
    assert ids_of(matcher.mask()) == [a]
    matcher.accept(a)
    assert set(ids_of(matcher.mask())) == {a, special, padding}
    matcher.accept(padding)
    assert matcher.is_done


def test_end_tokens_are_no_text_even_if_the_tokenizer_takes_them_for_text() -> None:
    tokenizer, _ = BOTH["bytes"]
    a, b = (tokenizer.encode(letter)[0] for letter in "ab")
    compiler = compiler_module.GrammarCompiler(tokenizer, tokenizer.vocab_size, (b,))
    matcher = compiler.compile(describe(regex="a[ab]*")).start((b,))
    matcher.accept(a)
    assert b in ids_of(matcher.mask())
    matcher.accept(b)
    assert matcher.is_done


def test_a_token_that_is_not_permitted_leaves_it_stuck() -> None:
    tokenizer, compiler = BOTH["bytes"]
    matcher = compiler.compile(describe(choice=["ab", "ba"])).start((EOS,))
    matcher.accept(tokenizer.encode(" ")[0])
    for _ in range(2):
        assert matcher.is_stuck
        assert not matcher.is_done
        assert not ids_of(matcher.mask())
        matcher.accept(tokenizer.encode("a")[0])


def test_a_grammar_that_leads_nowhere_is_stuck_where_it_does() -> None:
    tokenizer, compiler = BOTH["bytes"]
    source = 'start: "b" NONE\nNONE: A & ~A\nA: "a"'
    matcher = compiler.compile(describe(grammar=source)).start((EOS,))
    matcher.accept(tokenizer.encode("b")[0])
    assert matcher.is_stuck


def test_special_tokens_are_permitted_where_a_grammar_names_them() -> None:
    tokenizer, compiler = BOTH["bytes"]
    special = next(id_ for id_ in range(3) if tokenizer.token_bytes(id_) == b"<|start|>")
    matcher = compiler.compile(describe(grammar='start: <|start|> "a"')).start((EOS,))
    assert ids_of(matcher.mask()) == [special]
    matcher.accept(special)
    assert ids_of(matcher.mask()) == tokenizer.encode("a")
    assert special not in ids_of(compiler.compile(describe(regex=".*")).start().mask())


def test_a_first_space_after_a_special_token_is_dropped_too() -> None:
    tokenizer, compiler = BOTH["marks"]
    matcher = compiler.compile(describe(grammar='start: <[1]> "a"')).start()
    matcher.accept(1)
    spellings = {tokenizer.decode([1, id_]) for id_ in ids_of(matcher.mask())}
    assert spellings == {"a", ""}


def test_matchers_of_one_grammar_do_not_see_each_other() -> None:
    tokenizer, compiler = BOTH["bytes"]
    grammar = compiler.compile(describe(choice=["ab", "ba"]))
    first, second = grammar.start(), grammar.start()
    a, b = (tokenizer.encode(letter)[0] for letter in "ab")
    first.accept(a)
    second.accept(b)
    assert (ids_of(first.mask()), ids_of(second.mask())) == ([b], [a])


def test_a_lexer_that_others_have_filled_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {**compiler_module.LIMITS, "max_lexer_states": 400}
    monkeypatch.setattr(compiler_module, "LIMITS", limits)
    tokenizer, compiler = create()
    letters = frozenset(tokenizer.encode(letter)[0] for letter in "ab")
    grammar = compiler.compile(describe(regex="([ab]*a[ab]{12}c)?x"))
    rng = random.Random(5)
    for _ in range(6):  # together they need more states than one lexer may have
        matcher = grammar.start()
        for _ in range(150):
            matcher.accept(rng.choice(sorted(letters)))
            assert letters <= set(ids_of(matcher.mask()))


def test_work_beyond_the_limits_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {**compiler_module.LIMITS, "max_lexer_states": 60}
    monkeypatch.setattr(compiler_module, "LIMITS", limits)
    tokenizer, compiler = create()
    letters = [tokenizer.encode(letter)[0] for letter in "ab"]
    matcher = compiler.compile(describe(regex="([ab]*a[ab]{12}c)?x")).start()
    rng = random.Random(5)
    for _ in range(400):
        matcher.accept(rng.choice(letters))
    assert matcher.is_stuck


class Panic(BaseException):
    """As the library's own: no `Exception`."""


@pytest.mark.parametrize("error", [Panic("x"), RuntimeError("x"), MemoryError("x")])
@pytest.mark.parametrize("call", ["compute_bitmask", "consume_tokens", "is_accepting"])
def test_a_library_that_breaks_off_is_the_end_of_that_answer_alone(
    call: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer, compiler = create()
    (a,), (b,) = tokenizer.encode("a"), tokenizer.encode("b")
    grammar = compiler.compile(describe(regex="a[ab]*b"))
    broken, other = grammar.start(), grammar.start()
    inner = broken._inner

    class Breaking:
        def __getattr__(self, name: str) -> Any:
            return self._break if name == call else getattr(inner, name)

        def _break(self, *_: object) -> None:
            raise error

    broken._inner = Breaking()  # type: ignore[assignment]
    broken._create = lambda: Breaking()  # type: ignore[assignment,return-value]
    broken.accept(a)
    assert broken.is_stuck
    assert ids_of(broken.mask()) == []
    assert type(error).__name__ in caplog.text
    other.accept(a)
    assert set(ids_of(other.mask())) == {a, b}
