from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.engine.grammar.compiler import GrammarCompiler
from heddle.engine.grammar.vocabulary import Vocabulary
from tests.support.grammars import BOTH, describe, ids_of


def vocabulary(kind: str, size: int | None = None, eos: tuple[int, ...] = (0,)) -> Vocabulary:
    tokenizer, _ = BOTH[kind]
    return Vocabulary(tokenizer, size or tokenizer.vocab_size, eos)


@pytest.mark.parametrize("kind", BOTH)
@given(st.binary(max_size=40))
def test_any_bytes_of_text_can_be_spelled_in_tokens_of_text(kind: str, data: bytes) -> None:
    words, data = vocabulary(kind), data.replace(b"\xff", b"")
    ids = words.spell(data)
    assert ids is not None
    assert b"".join(words.tokens[id_] for id_ in ids) == data
    assert all(words.has_text(id_) for id_ in ids)


def test_the_longest_token_is_spelled_first_and_missing_bytes_are_noticed() -> None:
    words = vocabulary("bytes")
    assert [words.tokens[id_] for id_ in words.spell(b"thea") or ()] == [b"the", b"a"]
    few = vocabulary("bytes", size=70)
    assert few.spell(b"the") is None


@pytest.mark.parametrize("size", [31, 32, 33, 64, 65, 127])
def test_masks_are_whole_words_of_real_ids(size: int) -> None:
    words = vocabulary("bytes", size=size)
    assert words.mask_bytes % 4 == 0
    assert 0 <= words.mask_bytes * 8 - size < 32
    assert ids_of(words.real_bits.tobytes()) == list(range(size))
    assert ids_of(words.bits([0, size - 1]).tobytes()) == [0, size - 1]


def test_special_end_and_padding_ids_have_no_text() -> None:
    tokenizer, _ = BOTH["bytes"]
    (letter,) = tokenizer.encode("a")
    words = vocabulary("bytes", size=tokenizer.vocab_size + 5, eos=(letter,))
    assert not any(map(words.has_text, (0, 1, 2, letter, tokenizer.vocab_size + 1)))
    assert all(map(words.has_text, tokenizer.encode("bcd")))
    called = next(id_ for id_, data in enumerate(words.tokens) if data == b"<tool call>")
    assert words.has_text(called)


class Odd:
    """A letter, and tokens that the library would stumble over."""

    strips_first_space = False
    tokens = (b"a", b"a" * 5000, b"\xff", b"\xff[0]", b"a" * 512, b"")

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]

    def is_special(self, token_id: int) -> bool:
        return False


def test_tokens_that_are_no_text_of_any_model_are_never_permitted() -> None:
    compiler = GrammarCompiler(Odd(), len(Odd.tokens), ())  # type: ignore[arg-type]
    assert ids_of(compiler.compile(describe(regex="a+")).start().mask()) == [0, 4]


def test_ids_that_begin_with_a_space() -> None:
    words = vocabulary("marks")
    assert {words.tokens[id_] for id_ in words.spaced} >= {b" ", b" a", b" b"}
    for token_id, rest in words.spaced.items():
        assert rest is not None
        assert words.tokens[token_id] == b" " + b"".join(words.tokens[id_] for id_ in rest)


@pytest.mark.parametrize("size", [63, 64, 95, 96])
def test_the_end_of_the_grammar_is_no_id_of_the_model(size: int) -> None:
    inner = vocabulary("bytes", size=size).inner
    assert inner.vocab_size == size + 1
    assert inner.eos_token == size
