from __future__ import annotations

from typing import Any

import pytest

from heddle.config import SamplingParams
from heddle.engine.answer import Answer, create_assembler, position_logprobs
from heddle.engine.outputs import Logprob
from heddle.engine.tokenizer import Tokenizer
from heddle.step.batch import SampledToken, TokenLogprobs
from tests.support.byte_tokenizer import byte_level

TOKENIZER = Tokenizer(byte_level(), special_tokens={}, chat_template=None)
END = 0


def token(piece: str) -> int:
    (found,) = TOKENIZER.encode(piece)
    return found


def answer(**fields: Any) -> Answer:
    params = SamplingParams(**fields)
    return Answer(
        index=0,
        params=params,
        tokenizer=TOKENIZER,
        assembler=create_assembler(TOKENIZER, params, ()),
    )


def add(
    target: Answer, token_id: int, reason: Any = None, stop_id: Any = None, **sampled: Any
) -> str | None:
    return target.add(SampledToken(request_id=0, token_id=token_id, **sampled), reason, stop_id)


def test_length_releases_what_was_withheld() -> None:
    found = answer(stop=["xyz"])
    assert add(found, token("a")) is None
    assert add(found, token("x")) is None
    assert found.snapshot().text == "a"
    add(found, token("y"), "length")
    output = found.snapshot()
    assert (output.text, output.finish_reason, output.stop_reason) == ("axy", "length", None)


def test_stop_string_cuts_text_but_keeps_ids() -> None:
    found = answer(stop=["xy"])
    for piece in "ax":
        assert add(found, token(piece)) is None
    assert add(found, token("y")) == "xy"
    output = found.snapshot()
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", "xy")
    assert output.token_ids == tuple(map(token, "axy"))


def test_stop_string_outranks_length_and_ids() -> None:
    by_length = answer(stop=["b"])
    assert add(by_length, token("b"), "length") == "b"
    assert by_length.snapshot().finish_reason == "stop"
    by_id = answer(stop=["b"], stop_token_ids=[token("b")])
    assert add(by_id, token("b"), "stop", token("b")) == "b"
    assert by_id.snapshot().stop_reason == "b"


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_text_of_a_stop_id_is_kept_only_if_asked(include: bool, text: str) -> None:
    found = answer(stop_token_ids=[token("b")], include_stop_str_in_output=include)
    add(found, token("a"))
    assert add(found, token("b"), "stop", token("b")) is None
    output = found.snapshot()
    assert (output.text, output.stop_reason) == (text, token("b"))


def test_end_of_text_token_shows_no_text() -> None:
    found = answer()
    add(found, token("a"))
    add(found, END, "stop")
    assert found.snapshot().text == "a"
    assert found.snapshot().token_ids == (token("a"), END)


def test_stop_strings_wait_for_min_tokens() -> None:
    found = answer(stop=["a"], min_tokens=2, max_tokens=9)
    assert add(found, token("a")) is None
    assert add(found, token("a")) == "a"
    assert found.snapshot().text == "a"


def test_news_are_told_once_and_join_to_the_whole() -> None:
    found = answer(stop=["zz"], logprobs=0)
    values = TokenLogprobs(token_id=5, logprob=-1.5, rank=1, top_token_ids=(), top_logprobs=())
    told = []
    for piece in "azb":
        add(found, token(piece), logprobs=values)
        told.append(found.news())
    assert [news.text for news in told] == ["a", "", "zb"]
    assert [len(news.token_ids) for news in told] == [1, 1, 1]
    assert [len(news.logprobs or ()) for news in told] == [1, 1, 1]
    assert found.news().token_ids == ()
    assert found.snapshot().text == "azb"
    assert found.snapshot().cumulative_logprob == -4.5


def test_cut_short_releases_withheld_text() -> None:
    found = answer(stop=["xy"])
    add(found, token("x"))
    found.cut_short("abort")
    assert (found.snapshot().text, found.snapshot().finish_reason) == ("x", "abort")


def test_without_text_there_are_only_ids() -> None:
    params = SamplingParams(detokenize=False)
    assert create_assembler(TOKENIZER, params, ()) is None
    assert create_assembler(None, SamplingParams(), ()) is None
    found = Answer(index=0, params=params, tokenizer=None, assembler=None, returns_logits=True)
    add(found, 7, logits=b"row")
    found.cut_short("abort")
    output = found.snapshot()
    assert (output.text, output.token_ids, output.logits) == ("", (7,), (b"row",))
    assert output.logprobs is None
    with pytest.raises(ValueError, match="without a token"):
        found.add(SampledToken(request_id=0, token_id=None), None, None)


def test_chosen_token_comes_first_and_keeps_its_rank() -> None:
    a, b, c = map(token, "abc")
    values = TokenLogprobs(
        token_id=c, logprob=-3.0, rank=9, top_token_ids=(a, b), top_logprobs=(-0.5, -1.0)
    )
    assert list(position_logprobs(values, TOKENIZER).items()) == [
        (c, Logprob(-3.0, 9, "c")),
        (a, Logprob(-0.5, 1, "a")),
        (b, Logprob(-1.0, 2, "b")),
    ]
    best = TokenLogprobs(
        token_id=a, logprob=-0.5, rank=1, top_token_ids=(a, b), top_logprobs=(-0.5, -1.0)
    )
    assert position_logprobs(best, None) == {a: Logprob(-0.5, 1, None), b: Logprob(-1.0, 2, None)}
