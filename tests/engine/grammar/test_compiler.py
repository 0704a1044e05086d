from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from heddle.engine.grammar import compiler as compiler_module
from heddle.engine.grammar.compiler import LIMITS, GrammarCompiler
from heddle.engine.grammar.matcher import Matcher
from heddle.errors import RequestError
from tests.support.grammars import BOTH, EOS, create, describe, ids_of


def chain(count: int, rule: str) -> dict[str, Any]:
    """A schema whose definitions lead to each other, `count` deep; `rule` holds the reference."""
    definitions = {
        str(n): json.loads(rule.replace("NEXT", f'{{"$ref":"#/$defs/{n + 1}"}}'))
        for n in range(count)
    }
    return {"$ref": "#/$defs/0", "$defs": {**definitions, str(count): {"type": "null"}}}


def rules(count: int, body: str) -> str:
    """Rules that lead to each other."""
    names = (f"\nr{n}: {body.replace('NEXT', f'r{n + 1}')}" for n in range(count))
    return f'{"".join(names)}\nr{count}: "c"'


def options(number: int) -> dict[str, Any]:
    """One of eight objects."""
    names = [f"{number}{letter}" for letter in "abcdefgh"]
    return {"anyOf": [{"properties": {name: {}}, "required": [name]} for name in names]}


DOUBLING = rules(40, "NEXT NEXT")


def wide(count: int) -> dict[str, Any]:
    """An object of that many optional properties."""
    return {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(count)}}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("look-around", {"regex": "a(?=b)"}, "look-around"),
    ("back-reference", {"regex": r"(a)\1"}, "backreferences"),
    ("range", {"regex": "[z-a]"}, "range"),
    ("nested groups", {"regex": "(" * 4000 + "a" + ")" * 4000}, "nested"),
    ("nested stars", {"regex": "(?:" * 200 + "a" + "){1,9}" * 200}, ""),
    ("too large", {"regex": "".join(f"[a-{chr(98 + n % 20)}]?" for n in range(1300))}, ""),
    ("only the empty text", {"regex": "a{0}"}, "only the empty text"),
    ("no text", {"grammar": 'start: start "a"'}, "no text"),
    ("no such rule", {"grammar": "start: foo"}, "foo"),
    ("no start", {"grammar": 'a: "a"'}, "start"),
    ("not closed", {"grammar": 'start: "a'}, ""),
    ("nested rule", {"grammar": "start: " + "(" * 7000 + '"a"' + ")" * 7000}, "nested"),
    ("nested gbnf", {"grammar": "root ::= " + "(" * 7000 + '"a"' + ")" * 7000}, "nested"),
    ("broken gbnf", {"grammar": "root ::= ("}, "Expected"),
    ("token of itself", {"grammar": 'start: R\nR: "a" R'}, "circular"),
    ("tokens that double", {"grammar": f"start: R0{DOUBLING.upper()}"}, ""),
    ("unknown keyword", {"json": {"not": {"type": "null"}}}, "not"),
    ("unknown keyword, leniently", {"json": {"not": {}, "x-guidance": {"lenient": True}}}, "not"),
    ("unique items", {"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ("unknown format", {"json": {"type": "string", "format": "shoe-size"}}, "format"),
    ("options that overlap", {"json": {"oneOf": [{"minimum": 1}, {"maximum": 9}]}}, "oneOf"),
    ("no such definition", {"json": {"$ref": "#/$defs/a"}}, "does not exist"),
    ("itself", {"json": {"$ref": "#"}}, "no text"),
    ("a loop", {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "no text"),
    ("another document", {"json": {"$id": "http://a.test/x", "$ref": "#http://b.test/y"}}, ""),
    ("cannot hold", {"json": {"type": "array", "items": False, "minItems": 1}}, ""),
    ("type", {"json": {"type": 5}}, "type"),
    ("pattern", {"json": {"type": "string", "pattern": "(?<!a)b"}}, "look-around"),
    ("remainder", {"json": {"type": "integer", "multipleOf": 999999937}}, ""),
    ("very many properties", {"json": wide(1500)}, "too many options at one place"),
    ("of entries, too", {"json": {"type": "array", "items": wide(1500)}}, "too many options"),
    ("products of options", {"json": {"allOf": [options(n) for n in range(8)]}}, "too large"),
]


@pytest.mark.parametrize(
    ("given", "reason"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_what_cannot_be_followed_is_refused_without_repeating_it(
    given: dict[str, Any], reason: str
) -> None:
    _, compiler = BOTH["bytes"]
    params = describe(**given)
    with pytest.raises(RequestError) as caught:
        compiler.compile(params)
    message = str(caught.value)
    assert caught.value.code == "invalid_grammar"
    assert message.startswith(f"structured_outputs.{params.kind} cannot be followed: ")
    assert reason in message
    assert len(message) < 240
    assert not any(params.source[at : at + 33] in message for at in range(len(params.source) - 32))


DEMANDING: list[tuple[str, dict[str, Any]]] = [
    ("catastrophic", {"regex": "(a+)+b"}),
    ("many options", {"regex": "|".join(f"k{n}x*" for n in range(900))}),
    ("long repeats", {"regex": "a{1,100000}"}),
    ("repeats of repeats", {"regex": "(((a{1,1000}){1,1000}){1,1000})"}),
    ("many states", {"regex": "[ab]*a[ab]{400}"}),
    ("many optional letters", {"regex": "a?" * 4096}),
    ("ambiguous", {"grammar": 'start: s\ns: s s s | "a" | s | ""'}),
    ("same options", {"grammar": "start: (" + "|".join(['"a"'] * 1000) + ")*"}),
    ("deep rules", {"grammar": f"start: r0{rules(1000, 'NEXT')}"}),
    ("doubling rules", {"grammar": f"start: r0{DOUBLING}"}),
    ("huge repeats", {"grammar": 'start: (r{1000}){1000}\nr: "a" | "b"'}),
    ("nested arrays", {"json": json.loads('{"items":' * 31 + "{}" + "}" * 31)}),
    ("recursive", {"json": {"type": "array", "items": {"$ref": "#"}}}),
    ("deep references", {"json": chain(1600, '{"items":NEXT}')}),
    ("deep joint references", {"json": chain(1200, '{"allOf":[NEXT,{}]}')}),
    ("deep nested references", {"json": chain(180, '{"items":' * 28 + "NEXT" + "}" * 28)}),
    ("huge enum", {"json": {"enum": [f"entry {n} {'z' * 40}" for n in range(1000)]}}),
    ("many properties", {"json": wide(200)}),
    ("long string", {"json": {"type": "string", "minLength": 100000, "maxLength": 1000000}}),
    ("long array", {"json": {"type": "array", "items": {"type": "null"}, "minItems": 100000}}),
    ("many texts", {"choice": [f"{n} of a thousand texts" for n in range(1000)]}),
]


@pytest.mark.parametrize("given", [case[1] for case in DEMANDING], ids=[c[0] for c in DEMANDING])
def test_a_demanding_description_is_followed_or_stuck(given: dict[str, Any]) -> None:
    """Neither a crash nor a state in which the matcher does not know how it goes on."""
    _, compiler = BOTH["bytes"]
    matcher = compiler.compile(describe(**given)).start((EOS,))
    rng = random.Random(3)
    for _ in range(60):
        if matcher.is_done:
            break
        legal = ids_of(matcher.mask())
        assert bool(legal) != matcher.is_stuck
        if matcher.is_stuck:
            break
        matcher.accept(rng.choice(legal))


def test_equal_descriptions_are_compiled_once_and_old_ones_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler_module, "MAX_GRAMMARS", 2)
    _, compiler = create()
    first = compiler.compile(describe(json={"type": "integer"}))
    assert compiler.compile(describe(json='{ "type": "integer" }')) is first
    second = compiler.compile(describe(regex="a"))
    assert compiler.compile(describe(json={"type": "integer"})) is first
    compiler.compile(describe(regex="b"))  # the second was not asked for longest
    assert compiler.compile(describe(json={"type": "integer"})) is first
    assert compiler.compile(describe(regex="a")) is not second


def test_very_many_properties_that_are_required_are_no_options() -> None:
    schema = {**wide(1500), "required": [f"p{n}" for n in range(1500)]}
    tokenizer, compiler = create()
    matcher = compiler.compile(describe(json=schema)).start((EOS,))
    for token_id in tokenizer.encode('{"p0":"a", "p1":"b", "p2":'):
        assert token_id in ids_of(matcher.mask())
        matcher.accept(token_id)


def test_a_worn_grammar_is_compiled_again_by_the_next_request_and_not_by_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiler_module, "LIMITS", {**LIMITS, "max_lexer_states": 60})
    monkeypatch.setattr(compiler_module, "MAX_RENEWAL_SECONDS", -1.0)  # any takes too long
    tokenizer, compiler = create()
    form = describe(regex="([ab]*a[ab]{12}c)?x")
    grammar = compiler.compile(form)
    assert compiler.compile(form) is grammar
    matcher, rng = grammar.start(), random.Random(5)
    for _ in range(200):
        matcher.accept(tokenizer.encode(rng.choice("ab"))[0])
    assert matcher.is_stuck
    fresh = compiler.compile(form)
    assert fresh is not grammar
    assert not fresh.start().is_stuck


def test_texts_of_different_kinds_are_different_descriptions() -> None:
    tokenizer, compiler = create()
    (bracket,) = tokenizer.encode("[")
    assert bracket not in ids_of(compiler.compile(describe(regex='["a"]')).start().mask())
    assert ids_of(compiler.compile(describe(choice=['["a"]'])).start().mask()) == [bracket]


def test_several_threads_may_compile_and_follow() -> None:
    _, compiler = create()
    expected = {n: follow(compiler, n) for n in range(4)}
    barrier = threading.Barrier(8)

    def task(number: int) -> list[bytes]:
        barrier.wait()
        return follow(compiler, number % 4)

    _, fresh = create()
    for used in (compiler, fresh):
        compiler = used
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(task, range(8)))
        assert found == [expected[n % 4] for n in range(8)]


def follow(compiler: GrammarCompiler, number: int) -> list[bytes]:
    """Masks along one walk."""
    matcher: Matcher = compiler.compile(describe(regex=f"[a-z]{{{number + 3}}}x?")).start((EOS,))
    masks = []
    while not matcher.is_done:
        masks.append(matcher.mask())
        matcher.accept(ids_of(masks[-1])[-1])
    return masks


def test_a_model_without_tokenizer_is_refused() -> None:
    with pytest.raises(RequestError, match="needs a tokenizer"):
        GrammarCompiler(None, 64, (EOS,)).compile(describe(regex="a"))


def test_an_answer_for_which_there_is_no_room_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of an answer a limit is reached, and nothing new can be made."""
    monkeypatch.setattr(compiler_module, "LIMITS", {**LIMITS, "max_lexer_states": 60})
    tokenizer, compiler = create()
    matcher = compiler.compile(describe(regex="([ab]*a[ab]{12}c)?x")).start()
    monkeypatch.setattr(compiler_module.threading.Thread, "start", refuse_to_start)
    rng = random.Random(5)
    for _ in range(200):
        matcher.accept(tokenizer.encode(rng.choice("ab"))[0])
    assert matcher.is_stuck
    with pytest.raises(RequestError, match="no room to compile") as caught:
        compiler.compile(describe(regex="b"))
    assert caught.value.code == "invalid_grammar"


def refuse_to_start(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_the_size_of_stacks_of_other_threads_stays() -> None:
    before = threading.stack_size()
    create()[1].compile(describe(regex="a"))
    assert threading.stack_size() == before


def test_the_library_is_imported_by_the_first_request_that_needs_it() -> None:
    code = (
        "import sys; import heddle.engine.llm, heddle.engine.grammar.compiler; "
        "sys.exit('llguidance' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
