from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from heddle.engine.text import Detokenizer, StopMatcher, TextAssembler, decode

SPECIAL_ID = 10_000


class RawTokens:
    """Token i of a table stands for given bytes; one id is special."""

    def __init__(self, table: list[bytes], strips_first_space: bool = False) -> None:
        self._table = table
        self.strips_first_space = strips_first_space

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == SPECIAL_ID:
            return b"<end>"
        return self._table[token_id] if token_id < len(self._table) else b""

    def is_special(self, token_id: int) -> bool:
        return token_id == SPECIAL_ID


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """Pieces of data, cut at the given places."""
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(ends)]


texts = st.text(st.sampled_from("ab xyz\u00e9\u20ac\u65e5\U0001f600\u0301"), max_size=20)
places = st.lists(st.integers(0, 100), max_size=12)


@given(st.one_of(texts.map(str.encode), st.binary(max_size=24)), places)
def test_joined_stream_is_the_full_decode(data: bytes, where: list[int]) -> None:
    pieces = cut(data, where)
    detokenizer = Detokenizer(RawTokens(pieces))
    stream = [detokenizer.push(index) for index in range(len(pieces))]
    assert "".join([*stream, detokenizer.finish()]) == data.decode("utf-8", errors="replace")


@given(texts, places)
def test_no_replacement_mark_before_the_end_of_valid_text(text: str, where: list[int]) -> None:
    pieces = cut(text.encode(), where)
    detokenizer = Detokenizer(RawTokens(pieces))
    assert all("\ufffd" not in detokenizer.push(index) for index in range(len(pieces)))
    assert detokenizer.unfinished() == detokenizer.finish() == ""


def test_three_bytes_of_one_character() -> None:
    tokens = RawTokens([b"\xe2", b"\x82", b"\xac"])
    whole = Detokenizer(tokens)
    assert [whole.push(i) for i in range(3)] == ["", "", "\u20ac"]
    assert whole.finish() == ""
    short = Detokenizer(tokens)
    assert [short.push(0), short.push(1), short.unfinished()] == ["", "", "\ufffd"]
    assert short.finish() == "\ufffd"


@given(texts, st.integers(0, 80), places)
def test_prompt_cut_at_any_byte_leaks_nothing(text: str, at: int, where: list[int]) -> None:
    data = ("ab\u20ac" + text).encode()
    at = 1 + at % len(data)
    prompt, completion = data[:at], data[at:]
    assume(completion)
    pieces = cut(completion, where)
    tokens = RawTokens([*pieces, prompt])
    detokenizer = Detokenizer(tokens, prompt_token_ids=[len(pieces)])
    found = "".join(map(detokenizer.push, range(len(pieces)))) + detokenizer.finish()
    # A character belongs to the completion if its last byte does.
    complete_before = len(prompt.decode("utf-8", errors="ignore"))
    assert found == data.decode()[complete_before:]


def test_unfinished_prompt_that_is_not_continued_shows_no_mark() -> None:
    tokens = RawTokens([b"ok", b"\xe2\x82", b"\xe0", b"\x80"])
    detokenizer = Detokenizer(tokens, prompt_token_ids=[1])
    assert detokenizer.push(0) == "ok"
    silent = Detokenizer(tokens, prompt_token_ids=[1])
    assert silent.finish() == ""
    # 0x80 cannot follow 0xE0: the mark is that of 0x80, which the answer itself produced.
    broken = Detokenizer(tokens, prompt_token_ids=[2])
    assert broken.push(3) + broken.finish() == "\ufffd"


def test_special_tokens_are_left_out_or_shown_as_asked() -> None:
    tokens = RawTokens([b"a", b"b"])
    ids = [0, SPECIAL_ID, 1, 55]
    assert decode(tokens, ids, skip_special_tokens=True) == "ab"
    assert decode(tokens, ids, skip_special_tokens=False) == "a<end>b"


def test_first_space_is_dropped_once_where_the_tokenizer_does_so() -> None:
    tokens = RawTokens([b" a", b" "], strips_first_space=True)
    assert decode(tokens, [SPECIAL_ID, 0, 0], skip_special_tokens=True) == "a a"
    assert decode(tokens, [1, 0], skip_special_tokens=True) == " a"
    assert decode(RawTokens([b" a"]), [0, 0], skip_special_tokens=True) == " a a"


# Stop strings. The oracle looks at the whole text, character by character.


def first_complete(text: str, stops: list[str]) -> tuple[int, int, str] | None:
    """(end, start, stop) of the match that is complete first, of these the one that began first."""
    for end in range(1, len(text) + 1):
        done = [(end, end - len(s), s) for s in stops if text[:end].endswith(s)]
        if done:
            return min(done)
    return None


stop_lists = st.lists(
    st.text(st.sampled_from("xyz\u20ac"), min_size=1, max_size=4), min_size=1, max_size=4
)
stop_texts = st.text(st.sampled_from("xyz\u20aca"), max_size=24)


@given(stop_texts, stop_lists, places, st.booleans())
def test_stop_is_found_the_same_however_text_is_cut(
    text: str, stops: list[str], where: list[int], include: bool
) -> None:
    tokens = RawTokens(cut(text.encode(), where))
    count = len(cut(text.encode(), where))
    assembler = TextAssembler(Detokenizer(tokens), StopMatcher(stops, include_stop=include))
    sent: list[str] = []
    found = None
    for index in range(count):
        piece, found = assembler.push(index, may_stop=True)
        sent.append(piece)
        if found is not None:
            break
    if found is None:
        sent.append(assembler.finish())
    expected = first_complete(text, stops)
    if expected is None:
        assert (found, "".join(sent)) == (None, text)
    else:
        end, start, stop = expected
        assert (found, "".join(sent)) == (stop, text[: end if include else start])


@given(stop_texts, stop_lists)
def test_what_was_sent_is_never_taken_back_nor_withheld_without_need(
    text: str, stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    sent, seen = "", ""
    for character in text:
        if matcher.find(character) is not None:
            break
        seen += character
        sent += matcher.push(character)
        held = seen[len(sent) :]
        assert seen.startswith(sent)
        tails = [seen[i:] for i in range(len(seen) + 1)]
        longest = max((t for t in tails if any(s.startswith(t) for s in stops)), key=len)
        assert held == longest


def test_literal_pieces() -> None:
    matcher = StopMatcher(["xyz"])
    assert matcher.push("ax") == "a"
    match = matcher.find("yz b")
    assert match is not None
    assert (match.text, match.stop) == ("", "xyz")
    other = StopMatcher(["xyz"])
    assert [other.push("ax"), other.push("yq"), other.finish()] == ["a", "xyq", ""]
    kept = StopMatcher(["xyz"], include_stop=True)
    kept.push("ax")
    match = kept.find("yz b")
    assert match is not None
    assert match.text == "xyz"


def test_two_stops_that_end_together_give_the_longer_and_the_earlier_end_wins() -> None:
    match = StopMatcher(["b", "ab"]).find("xab")
    assert match is not None
    assert (match.text, match.stop) == ("x", "ab")
    match = StopMatcher(["abc", "b"]).find("abc")
    assert match is not None
    assert (match.text, match.stop) == ("a", "b")


def test_text_of_the_first_tokens_cannot_stop_but_can_begin_a_stop() -> None:
    tokens = RawTokens([b"end", b"en", b"d!"])
    assembler = TextAssembler(Detokenizer(tokens), StopMatcher(["end"]))
    assert assembler.push(0, may_stop=False) == ("end", None)
    assert assembler.push(1, may_stop=False) == ("", None)
    assert assembler.push(2, may_stop=True) == ("", "end")


@pytest.mark.parametrize(
    ("last", "keep", "expected"),
    [
        (0, False, ("a", None)),
        (0, True, ("az", None)),
        (1, False, ("", "a!")),
        (SPECIAL_ID, True, ("a", None)),
    ],
)
def test_last_token_by_id_keeps_its_text_only_if_asked(
    last: int, keep: bool, expected: tuple[str, str | None]
) -> None:
    tokens = RawTokens([b"z", b"!", b"a"])
    assembler = TextAssembler(Detokenizer(tokens), StopMatcher(["a!"]))
    assert assembler.push(2, may_stop=True) == ("", None)
    assert assembler.push_last(last, keep_text=keep) == expected


def test_last_token_that_completes_a_character() -> None:
    tokens = RawTokens([b"\xe2\x82", b"\xac"])
    for keep, expected in ((True, "\u20ac"), (False, "\ufffd")):
        assembler = TextAssembler(Detokenizer(tokens), StopMatcher([]))
        assembler.push(0, may_stop=True)
        assert assembler.push_last(1, keep_text=keep) == (expected, None)
