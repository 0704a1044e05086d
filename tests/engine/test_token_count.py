"""The bound never exceeds the truth, and says nothing where it could."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from heddle.engine import tokenizer as tokenizer_module
from tests.support.byte_tokenizer import byte_level, printable, space_marked


def loaded(inner: Tokenizer) -> tokenizer_module.Tokenizer:
    return tokenizer_module.Tokenizer(inner, special_tokens={}, chat_template=None)


BOTH = {
    "bytes": loaded(byte_level()),
    "marks": loaded(space_marked()),
    "few": loaded(printable()),  # most bytes have no token, and vanish
}
texts = st.text("thea b\u2581\u20ac\u0301<|end|>", max_size=60) | st.text(max_size=40)


@pytest.mark.parametrize("name", BOTH)
@given(text=texts, count=st.integers(1, 30))
def test_no_text_has_fewer_tokens(name: str, text: str, count: int) -> None:
    text = text * count
    tokenizer = BOTH[name]
    assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text))


def test_the_bound_is_reached_by_the_longest_token() -> None:
    tokenizer = BOTH["bytes"]
    text = "<tool call>" * 7
    assert tokenizer.fewest_tokens(text) == len(tokenizer.encode(text)) == 7
    assert tokenizer.fewest_tokens(text + "a") == 8


def nfc(inner: Tokenizer) -> None:
    inner.normalizer = normalizers.Sequence([normalizers.NFC()])


def test_what_is_composed_is_counted_only_where_nothing_can_be() -> None:
    inner = byte_level()
    nfc(inner)
    tokenizer = loaded(inner)
    assert tokenizer.fewest_tokens("a" * 1100) == 100
    assert tokenizer.fewest_tokens("e\u0301" * 1100) == 0


def strip(inner: Tokenizer) -> None:
    inner.normalizer = normalizers.Strip()


def replace(inner: Tokenizer) -> None:
    inner.normalizer = normalizers.Replace("aa", "a")


def replace_pattern(inner: Tokenizer) -> None:
    inner.normalizer = normalizers.Replace(Regex(" +"), "\u2581")


def drop_spaces(inner: Tokenizer) -> None:
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()]
    )


def drop_matches(inner: Tokenizer) -> None:
    inner.pre_tokenizer = pre_tokenizers.Split("a", "removed")


def swallow(inner: Tokenizer) -> None:
    inner.add_special_tokens([AddedToken("<|x|>", rstrip=True)])


@pytest.mark.parametrize(
    "change", [strip, replace, replace_pattern, drop_spaces, drop_matches, swallow]
)
def test_a_step_that_may_take_text_away_leaves_nothing_known(
    change: Callable[[Tokenizer], None],
) -> None:
    inner = byte_level()
    assert loaded(inner).fewest_tokens("a" * 1000) > 0
    change(inner)
    assert loaded(inner).fewest_tokens("a" * 1000) == 0


def test_bytes_without_a_token_do_not_count() -> None:
    tokenizer = BOTH["few"]
    assert tokenizer.fewest_tokens("a" * 1000) == tokenizer.fewest_tokens("a\u20ac" * 1000) > 0
    assert tokenizer.fewest_tokens("\u20ac" * 1000) == 0


def test_a_vocabulary_with_unknown_characters_leaves_nothing_known() -> None:
    inner = space_marked()
    assert loaded(inner).fewest_tokens("a" * 1000) > 0
    vocabulary = inner.get_vocab(with_added_tokens=False)
    inner.model = models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", fuse_unk=True)
    assert loaded(inner).fewest_tokens("a" * 1000) == 0
