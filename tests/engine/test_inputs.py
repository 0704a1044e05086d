from __future__ import annotations

import pytest

from heddle.config import SamplingParams
from heddle.engine.inputs import (
    PromptInput,
    bad_word_ids,
    check_params,
    parse_prompt,
    prompt_ids,
    split_prompts,
)
from heddle.engine.tokenizer import Tokenizer
from heddle.errors import RequestError
from tests.support.byte_tokenizer import byte_level

TOKENIZER = Tokenizer(byte_level(), special_tokens={}, chat_template=None)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("a", (["a"], False)),
        ([1, 2], ([[1, 2]], False)),
        ((1, 2), ([(1, 2)], False)),
        ({"prompt": "a"}, ([{"prompt": "a"}], False)),
        (["a"], (["a"], True)),
        ([[1, 2], "b"], ([[1, 2], "b"], True)),
        ([], ([], True)),
        (3.5, ([3.5], False)),
    ],
)
def test_one_prompt_is_told_from_a_list(prompts: object, expected: object) -> None:
    assert split_prompts(prompts) == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", PromptInput(text="a")),
        ([1, 2], PromptInput(token_ids=(1, 2))),
        ({"prompt": "a"}, PromptInput(text="a")),
        ({"prompt_token_ids": [1], "cache_salt": "s"}, PromptInput(token_ids=(1,), cache_salt="s")),
        (PromptInput(text="x"), PromptInput(text="x")),
    ],
)
def test_every_form_is_parsed(prompt: object, expected: PromptInput) -> None:
    assert parse_prompt(prompt) == expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (3.5, "not float"),
        (None, "not NoneType"),
        (b"bytes", "not bytes"),
        ({}, "needs `prompt`"),
        ({"promt": "a"}, "unknown prompt key 'promt'"),
        ({1: 2, "promt": "a"}, "unknown prompt key 1"),
        ({"prompt": 3}, "`prompt` is text, not int"),
        ({"prompt_token_ids": "12"}, "`prompt_token_ids` is a list, not str"),
        ({"prompt": "a", "cache_salt": "x" * 129}, "at most 128 characters"),
    ],
)
def test_anything_else_is_refused(prompt: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_prompt(prompt)


def test_ids_of_a_prompt() -> None:
    assert prompt_ids(PromptInput(token_ids=(1, 2)), None, 3) == (1, 2)
    found = prompt_ids(PromptInput(text="the a"), TOKENIZER, 300)
    assert TOKENIZER.decode(found) == "the a"
    # Ids given beside a text are taken as they are.
    assert prompt_ids(PromptInput(text="the", token_ids=(5,)), TOKENIZER, 300) == (5,)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (PromptInput(text=""), "empty"),
        (PromptInput(token_ids=()), "empty"),
        (PromptInput(token_ids=(1, 300)), r"token id 300 outside 0\.\.299"),
        (PromptInput(token_ids=(1, True)), "True is not a token id"),
        (PromptInput(token_ids=(1, "2")), "'2' is not a token id"),  # type: ignore[arg-type]
        (PromptInput(text="\ud800"), "lone surrogate"),
    ],
)
def test_bad_ids_are_refused(prompt: PromptInput, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        prompt_ids(prompt, TOKENIZER, 300)


def test_bad_words_are_found_at_the_start_and_inside() -> None:
    found = bad_word_ids(SamplingParams(bad_words=["a", " the"]), TOKENIZER)
    texts = [TOKENIZER.decode(ids) for ids in found]
    assert texts == ["a", "the", " a", " the"]
    assert bad_word_ids(SamplingParams(), None) == ()


def test_allow_list_must_leave_a_token() -> None:
    def check(bad_words: tuple[tuple[int, ...], ...] = (), **fields: object) -> None:
        params = SamplingParams(**fields)  # type: ignore[arg-type]
        check_params(params, vocab_size=10, eos_token_ids=(1,), bad_words=bad_words)

    check(allowed_token_ids=[1, 2], min_tokens=1)
    check(allowed_token_ids=[1], min_tokens=1, ignore_eos=True)
    check(((2, 2),), allowed_token_ids=[2])
    for bad in (
        {"allowed_token_ids": [1], "min_tokens": 1},
        {"allowed_token_ids": [1, 2], "min_tokens": 1, "stop_token_ids": [2]},
        {"bad_words": ((3,),), "allowed_token_ids": [3]},
    ):
        with pytest.raises(RequestError, match="leaves no token"):
            check(**bad)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="top_k=11"):
        check(top_k=11)
