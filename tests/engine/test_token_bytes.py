from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from heddle.engine.token_bytes import create_byte_table
from heddle.errors import UnsupportedError
from tests.support.byte_tokenizer import SPECIAL, byte_level, space_marked

BYTE_LEVEL = byte_level()
SPACE_MARKED = space_marked()


@given(st.text(max_size=20))
def test_byte_level_bytes_join_to_the_text(text: str) -> None:
    table = create_byte_table(BYTE_LEVEL)
    ids = BYTE_LEVEL.encode(text).ids
    assert b"".join(map(table.token_bytes, ids)) == text.encode()
    assert not table.strips_first_space


def test_every_byte_has_a_token() -> None:
    table = create_byte_table(BYTE_LEVEL)
    first = len(SPECIAL)
    assert {table.token_bytes(i) for i in range(first, first + 256)} == {
        bytes([byte]) for byte in range(256)
    }


def test_added_tokens_stand_for_their_own_text_and_unknown_ids_for_nothing() -> None:
    table = create_byte_table(BYTE_LEVEL)
    assert table.token_bytes(0) == b"<|end|>"
    tool = BYTE_LEVEL.token_to_id("<tool call>")
    assert table.token_bytes(tool) == b"<tool call>"  # its space is no byte character
    assert table.token_bytes(9999) == b""


@given(st.lists(st.sampled_from([" ", "a", "b", "\u20ac", "\u00e9"]), max_size=12).map("".join))
def test_space_marked_bytes_join_to_the_text(text: str) -> None:
    table = create_byte_table(SPACE_MARKED)
    ids = SPACE_MARKED.encode(text).ids
    joined = b"".join(map(table.token_bytes, ids)).decode()
    assert table.strips_first_space
    assert joined.removeprefix(" ") == SPACE_MARKED.decode(ids)


@pytest.mark.parametrize(
    ("decoder", "strips"),
    [
        (decoders.Metaspace(), True),
        (decoders.Metaspace(prepend_scheme="never"), False),
        (decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()]), False),
        (decoders.Sequence([decoders.ByteLevel()]), False),
    ],
)
def test_decoder_says_whether_the_first_space_goes(decoder: object, strips: bool) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"\u2581a": 0, "a": 1}, merges=[]))
    tokenizer.decoder = decoder
    assert create_byte_table(tokenizer).strips_first_space is strips
    if isinstance(decoder, decoders.Metaspace):  # the library agrees
        assert tokenizer.decode([0]) == ("a" if strips else " a")


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.CTC()])
def test_other_decoders_are_refused(decoder: object) -> None:
    tokenizer = Tokenizer(models.WordLevel(vocab={"a": 0}, unk_token="a"))
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(UnsupportedError, match="byte-level and space-mark"):
        create_byte_table(tokenizer)
