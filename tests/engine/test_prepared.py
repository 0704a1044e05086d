"""A request is checked whole before it waits: what is refused, and what is cut to the room."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.config.sampling import SamplingParams
from heddle.engine.grammar.compiler import GrammarCompiler
from heddle.engine.inputs import PromptInput
from heddle.engine.prepared import MAX_PIN_SECONDS, PreparedRequest, prepare_request
from heddle.engine.tokenizer import Tokenizer, load_tokenizer
from heddle.errors import PromptTooLong, RequestError
from tests.support.byte_tokenizer import printable, save_folder
from tests.support.fake_executor import EOS, resolved_config

WINDOW = 256
POOL = 256
VOCAB = 128


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    found = load_tokenizer(str(save_folder(tmp_path_factory.mktemp("t"), printable())))
    assert found is not None
    return found


def prepare(
    prompt: PromptInput | int = 3,
    params: SamplingParams | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    max_pinned_tokens: int = 0,
    usable_tokens: int = POOL,
    **options: Any,
) -> PreparedRequest:
    given = prompt if isinstance(prompt, PromptInput) else PromptInput(token_ids=(5,) * prompt)
    return prepare_request(
        given,
        params or SamplingParams(),
        resolved=resolved_config(vocab_size=VOCAB, max_pinned_tokens=max_pinned_tokens),
        tokenizer=tokenizer,
        eos_token_ids=(EOS,),
        usable_tokens=usable_tokens,
        grammars=GrammarCompiler(tokenizer, VOCAB, (EOS,)),
        **options,
    )


@pytest.mark.parametrize(
    ("usable_tokens", "code", "words"),
    [
        (POOL, "context_length_exceeded", f"maximum context length is {WINDOW} tokens"),
        (20, "kv_capacity_exceeded", "prompts of 20 tokens"),
    ],
)
def test_a_text_that_must_be_too_long_is_refused_unread(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, usable_tokens: int, code: str, words: str
) -> None:
    longest = max(len(tokenizer.token_bytes(id_)) for id_ in range(tokenizer.largest_token_id + 1))
    most = min(WINDOW - 1, usable_tokens) * longest

    def prepare_text(length: int) -> PreparedRequest:
        prompt = PromptInput(text="a" * length)
        return prepare(prompt, tokenizer=tokenizer, usable_tokens=usable_tokens)

    with pytest.raises(PromptTooLong, match="the prompt "):
        prepare_text(most)  # its tokens are counted: each letter is one
    monkeypatch.setattr(tokenizer, "encode", None)
    with pytest.raises(PromptTooLong, match=words) as caught:
        prepare_text(most + 1)
    assert caught.value.code == code
    with pytest.raises(TypeError, match="not callable"):
        prepare_text(most)


@given(
    st.integers(1, WINDOW + 5),
    st.none() | st.integers(1, 400),
    st.integers(4, 400),
)
def test_the_room_is_what_window_and_pool_leave(
    length: int, max_tokens: int | None, usable_tokens: int
) -> None:
    params = SamplingParams(max_tokens=max_tokens)
    # The last token is not fed back, so it needs no place in the pool.
    left = min(WINDOW - length, usable_tokens - length + 1)
    if left < 1:
        with pytest.raises(PromptTooLong):
            prepare(length, params, usable_tokens=usable_tokens)
        return
    found = prepare(length, params, usable_tokens=usable_tokens)
    assert found.room == (left if max_tokens is None else min(left, max_tokens))
    assert found.params is params
    assert found.prompt.ids == (5,) * length


def test_a_prompt_alone_needs_no_room_for_tokens() -> None:
    assert prepare(3, SamplingParams(max_tokens=7), wants_tokens=False).room == 0
    assert prepare(POOL - 1, wants_tokens=False).room == 0


def test_what_the_caller_says_is_kept() -> None:
    found = prepare(adapter="a", priority=-3, pin_seconds=5.0, max_pinned_tokens=64)
    assert (found.adapter, found.priority, found.pin_seconds) == ("a", -3, 5.0)
    plain = prepare()
    assert (plain.adapter, plain.priority, plain.pin_seconds, plain.grammar) == (
        None,
        0,
        None,
        None,
    )


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), MAX_PIN_SECONDS + 1])
def test_a_pin_has_its_time(seconds: float) -> None:
    with pytest.raises(RequestError, match="cache_pin_seconds=") as caught:
        prepare(pin_seconds=seconds, max_pinned_tokens=64)
    assert caught.value.code == "invalid_value"
    assert prepare(pin_seconds=MAX_PIN_SECONDS, max_pinned_tokens=64).pin_seconds == 86400


def test_a_pin_needs_room_for_pins() -> None:
    with pytest.raises(RequestError, match="--max-pinned-tokens, which is 0 here") as caught:
        prepare(pin_seconds=5.0)
    assert caught.value.code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("prompt", "fields", "words"),
    [
        (PromptInput(text="a"), {}, "no tokenizer; pass token ids"),
        (3, {"stop": ["a"]}, "stop strings need a tokenizer"),
        (3, {"bad_words": ["a"]}, "bad_words needs a tokenizer"),
        (3, {"structured_outputs": {"regex": "a"}}, "tokenizer"),
    ],
)
def test_text_needs_a_tokenizer(prompt: Any, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        prepare(prompt, SamplingParams(**fields))


@pytest.mark.parametrize(
    ("prompt", "fields", "words"),
    [
        (PromptInput(token_ids=()), {}, "empty"),
        (PromptInput(token_ids=(VOCAB,)), {}, "outside 0..127"),
        (3, {"stop_token_ids": [VOCAB]}, "outside 0..127"),
        (3, {"logit_bias": {VOCAB: 1.0}}, "outside 0..127"),
        (3, {"allowed_token_ids": [EOS], "min_tokens": 2}, "leaves no token"),
    ],
)
def test_tokens_that_the_model_has_not_are_refused(
    prompt: Any, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        prepare(prompt, SamplingParams(**fields))


def test_texts_become_tokens(tokenizer: Tokenizer) -> None:
    params = SamplingParams(stop=["x"], bad_words=["7"])
    found = prepare(PromptInput(text="abc"), params, tokenizer=tokenizer)
    assert found.prompt.ids == tuple(tokenizer.encode("abc", True))
    assert tuple(tokenizer.encode("7", False)) in found.bad_words


def test_a_grammar_is_compiled_once_and_followed_from_its_beginning(tokenizer: Tokenizer) -> None:
    params = SamplingParams(structured_outputs={"regex": "ab"}, stop_token_ids=[9])
    found = prepare(PromptInput(text="x"), params, tokenizer=tokenizer)
    (a,), (b,) = (tuple(tokenizer.encode(letter, False)) for letter in "ab")
    for _ in range(2):  # each answer has a matcher of its own
        matcher = found.start_matcher((EOS,))
        assert matcher is not None
        assert not matcher.is_done
        matcher.accept(a)
        assert not matcher.is_done
        matcher.accept(b)
        assert matcher.is_done


def test_without_a_grammar_nothing_is_matched() -> None:
    assert prepare().start_matcher((EOS,)) is None


def test_the_end_token_ends_a_form_unless_it_is_ignored(tokenizer: Tokenizer) -> None:
    seen: list[Any] = []

    class Noted:
        def start(self, ends: Any, stops: Any) -> str:
            seen.append((ends, stops))
            return "matcher"

    for ignore_eos in (False, True):
        params = SamplingParams(ignore_eos=ignore_eos, stop_token_ids=[9])
        found = replace(prepare(params=params), grammar=Noted())  # type: ignore[arg-type]
        assert found.start_matcher((EOS,)) == "matcher"
    assert seen == [((EOS,), (9,)), ((), (9,))]


def test_any_thread_may_check(tokenizer: Tokenizer) -> None:
    found: list[PreparedRequest] = []
    threads = [
        threading.Thread(
            target=lambda n=n: found.append(prepare(PromptInput(text="a" * n), tokenizer=tokenizer))
        )
        for n in range(1, 9)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(len(each.prompt.ids) for each in found) == list(range(1, 9))
