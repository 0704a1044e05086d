"""Log-probabilities in both shapes: aligned, finite, and by text without a loss of the likelier."""

from __future__ import annotations

import codecs
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.engine.outputs import Logprob, PositionLogprobs
from heddle.engine.text import Detokenizer
from heddle.server.logprobs import (
    LOWEST,
    TextOffsets,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    finite,
    prompt_logprobs_of,
    spelled_range,
)

BYTES = {1: b"a", 2: b"\xc3", 3: b"\xa9", 4: b"bc", 5: "é".encode(), 6: b"a"}


class Words:
    """A tokenizer of a few tokens."""

    strips_first_space = False

    def token_bytes(self, token_id: int) -> bytes:
        return BYTES[token_id]

    def is_special(self, token_id: int) -> bool:
        return False


NAMES = TokenNames(Words(), as_ids=False)  # type: ignore[arg-type]
AS_IDS = TokenNames(Words(), as_ids=True)  # type: ignore[arg-type]


def position(*entries: tuple[int, float, int]) -> PositionLogprobs:
    """(id, logprob, rank), the chosen token first."""
    return {
        token_id: Logprob(logprob, rank, BYTES[token_id].decode("utf-8", "replace"))
        for token_id, logprob, rank in entries
    }


class Marked:
    """Ids are characters; those below 10 are special, three characters each."""

    def is_special(self, token_id: int) -> bool:
        return token_id < 10

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(f"<{i}>" if self.is_special(i) else chr(i) for i in token_ids)


@pytest.mark.parametrize(
    ("text", "token_ids", "spelled"),
    [
        ("ab", [1, 97, 98], (1, 3)),
        ("ab", [1, 97, 98, 2], (1, 3)),
        ("<1>ab", [1, 97, 98], (0, 3)),
        ("<1>ab", [1, 1, 97, 98], (1, 4)),
        ("ab<2>", [97, 98, 2], (0, 3)),
        ("ab<2>", [1, 97, 98, 2, 2], (1, 4)),
        ("a", [97], (0, 1)),
        ("", [1], (1, 1)),
    ],
)
def test_special_tokens_that_a_text_names_are_of_it_and_added_ones_are_not(
    text: str, token_ids: list[int], spelled: tuple[int, int]
) -> None:
    assert spelled_range(Marked(), text, token_ids) == spelled  # type: ignore[arg-type]


def test_names_are_texts_bytes_or_ids() -> None:
    assert NAMES.text(4, None) == "bc"
    assert NAMES.text(2, None) == "\ufffd"
    assert NAMES.text(1, Logprob(0.0, 1, "known")) == "known"
    assert NAMES.data(5) == b"\xc3\xa9"
    assert AS_IDS.text(4, Logprob(0.0, 1, "known")) == "token_id:4"
    assert AS_IDS.data(4) == b"bc"
    bare = TokenNames(None, as_ids=False)
    assert (bare.text(7, None), bare.data(7)) == ("token_id:7", b"")


def test_a_completion_has_one_entry_per_token_in_four_lists() -> None:
    found = completion_logprobs(
        [None, position((4, -0.5, 1), (1, -2.0, 2)), position((5, -3.0, 9), (4, -0.1, 1))],
        [1, 4, 5],
        NAMES,
        [10, 11, 13],
    )
    assert found == {
        "tokens": ["a", "bc", "é"],
        "token_logprobs": [None, -0.5, -3.0],
        "top_logprobs": [None, {"bc": -0.5, "a": -2.0}, {"é": -3.0, "bc": -0.1}],
        "text_offset": [10, 11, 13],
    }


def test_of_tokens_with_equal_text_the_likelier_is_told() -> None:
    for entries in (((1, -3.0, 4), (6, -1.0, 1)), ((6, -1.0, 1), (1, -3.0, 4))):
        chosen = entries[0][0]
        found = completion_logprobs([position(*entries)], [chosen], NAMES, [0])
        assert found["top_logprobs"] == [{"a": -1.0}]
        assert found["token_logprobs"] == [entries[0][1]]
    by_id = completion_logprobs([position((1, -3.0, 4), (6, -1.0, 1))], [1], AS_IDS, [0])
    assert by_id["top_logprobs"] == [{"token_id:1": -3.0, "token_id:6": -1.0}]


def test_minus_infinity_can_be_written() -> None:
    never = position((1, -math.inf, 3), (4, 0.0, 1))
    shapes: list[Any] = [
        completion_logprobs([never], [1], NAMES, [0]),
        chat_logprobs([never], [1], 2, NAMES),
        prompt_logprobs_of([never]),
    ]
    for shape in shapes:
        text = json.dumps(shape, allow_nan=False)
        assert "-9999.0" in text
    assert finite(-math.inf) == finite(math.nan) == LOWEST == -9999.0


@given(st.floats(max_value=0.0, allow_infinity=False, allow_nan=False))
def test_a_finite_value_is_told_as_it_is(value: float) -> None:
    assert finite(value) == value


def test_a_chat_choice_has_alternatives_by_rank() -> None:
    found = chat_logprobs([position((1, -4.0, 7), (4, -0.1, 1), (5, -2.0, 2))], [1], 2, NAMES)
    (item,) = found["content"]
    assert (item["token"], item["logprob"], item["bytes"]) == ("a", -4.0, [97])
    tops = [(top["token"], top["logprob"], top["bytes"]) for top in item["top_logprobs"]]
    assert tops == [("bc", -0.1, [98, 99]), ("é", -2.0, [0xC3, 0xA9]), ("a", -4.0, [97])]


def test_a_chat_choice_without_alternatives_has_an_empty_list() -> None:
    found = chat_logprobs([position((1, -4.0, 7))], [1], 0, NAMES)
    assert found["content"][0]["top_logprobs"] == []


def test_bytes_of_a_chat_choice_join_to_its_text() -> None:
    ids = [1, 2, 3, 4]
    found = chat_logprobs([position((i, -1.0, 1)) for i in ids], ids, 0, NAMES)
    data = bytes(byte for item in found["content"] for byte in item["bytes"])
    assert data.decode() == "aébc"


def test_prompt_values_stand_under_their_ids() -> None:
    found = prompt_logprobs_of([None, position((6, -1.0, 2), (1, -0.5, 1))])
    assert found == [
        None,
        {
            "6": {"logprob": -1.0, "rank": 2, "decoded_token": "a"},
            "1": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        },
    ]
    assert prompt_logprobs_of([]) == []


def test_lists_of_unequal_length_are_our_mistake() -> None:
    with pytest.raises(ValueError, match="shorter"):
        completion_logprobs([None], [1, 4], NAMES, [0, 1])
    with pytest.raises(ValueError, match="shorter"):
        chat_logprobs([position((1, -1.0, 1))], [1, 4], 0, NAMES)


pieces = st.lists(st.lists(st.sampled_from(sorted(BYTES)), max_size=4), max_size=6)


@given(pieces, st.integers(0, 50))
def test_offsets_are_where_the_text_of_a_token_begins(cut: list[list[int]], first: int) -> None:
    offsets = TextOffsets(Detokenizer(Words()), first)
    found = [offset for ids in cut for offset in offsets.take(ids)]
    ids = [token_id for piece in cut for token_id in piece]
    for index, offset in enumerate(found):
        before = b"".join(BYTES[token_id] for token_id in ids[:index])
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        assert offset == first + len(decoder.decode(before))


def test_without_text_all_tokens_begin_at_once() -> None:
    assert TextOffsets(None, 7).take([1, 2, 3]) == [7, 7, 7]
