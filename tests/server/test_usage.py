"""Counts of a request: each prompt once, each token once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from heddle.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from heddle.server.usage import Envelope, Usage


def output(
    num_prompt: int, *num_tokens: int, cached: int = 0, reason: str = "", pinned: int = 0
) -> RequestOutput:
    answers = tuple(
        CompletionOutput(
            index=index,
            text="",
            token_ids=(5,) * count,
            cumulative_logprob=None,
            logprobs=None,
            finish_reason=None,
            stop_reason=None,
        )
        for index, count in enumerate(num_tokens)
    )
    return RequestOutput(
        request_id="0",
        prompt=None,
        prompt_token_ids=(1,) * num_prompt,
        prompt_logprobs=None,
        outputs=answers,
        finished=False,
        metrics=RequestMetrics(arrival_time=0.0),
        num_cached_tokens=cached,
        no_hit_reason=reason,
        num_pinned_tokens=pinned,
    )


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 4), max_size=3)), max_size=12),
)
def test_prompts_count_once_and_tokens_as_they_come(
    lengths: list[int], news: list[tuple[int, list[int]]]
) -> None:
    usage = Usage(hides_cached=False)
    told = [(index % len(lengths), counts) for index, counts in news]
    for index, counts in told:
        usage.note(index, output(lengths[index], *counts))
    found = usage.document()
    prompts = sum(lengths[index] for index in {index for index, _ in told})
    tokens = sum(sum(counts) for _, counts in told)
    assert found["prompt_tokens"] == prompts
    assert found["completion_tokens"] == tokens
    assert found["total_tokens"] == prompts + tokens


def test_cached_tokens_are_summed_over_prompts_and_the_last_word_counts() -> None:
    usage = Usage(hides_cached=False)
    usage.note(0, output(8, 1, reason="nothing shared"))
    usage.note(0, output(8, 1, cached=4))
    usage.note(1, output(9, 1, cached=3))
    assert usage.document()["prompt_tokens_details"] == {"cached_tokens": 7}


def test_a_miss_has_its_reasons_each_once() -> None:
    usage = Usage(hides_cached=False)
    for index, reason in enumerate(("nothing shared", "salted", "nothing shared", "")):
        usage.note(index, output(4, 1, reason=reason))
    details = usage.document()["prompt_tokens_details"]
    assert details == {"cached_tokens": 0, "miss_reason": "nothing shared; salted"}


def test_hits_hide_the_reasons_of_other_prompts() -> None:
    usage = Usage(hides_cached=False)
    usage.note(0, output(4, 1, reason="nothing shared"))
    usage.note(1, output(4, 1, cached=2))
    assert usage.document()["prompt_tokens_details"] == {"cached_tokens": 2}


def test_a_server_may_hide_what_others_have_asked() -> None:
    usage = Usage(hides_cached=True)
    usage.note(0, output(4, 1, cached=2))
    usage.note(1, output(4, 1, reason="nothing shared"))
    assert usage.document()["prompt_tokens_details"] == {"cached_tokens": 0}


def test_pins_are_told_where_there_are_some() -> None:
    usage = Usage(hides_cached=False)
    usage.note(0, output(4, 1, pinned=3))
    usage.note(1, output(4, 1, pinned=2))
    assert usage.document()["prompt_tokens_details"]["pinned_tokens"] == 5


def test_a_request_that_has_told_nothing_used_nothing() -> None:
    assert Usage(hides_cached=False).document() == {
        "prompt_tokens": 0,
        "completion_tokens": 0,
        "total_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_all_chunks_of_an_answer_are_of_one_envelope() -> None:
    envelope = Envelope("cmpl", "toy", "heddle-1")
    first, second = envelope.document("a", []), envelope.document("b", [{"index": 0}], usage=None)
    same = ("id", "created", "model", "system_fingerprint")
    assert [first[name] for name in same] == [second[name] for name in same]
    assert first["id"].startswith("cmpl-")
    assert (first["object"], second["object"]) == ("a", "b")
    assert second["usage"] is None
    assert "usage" not in first
    assert Envelope("cmpl", "toy", "x").id != envelope.id
