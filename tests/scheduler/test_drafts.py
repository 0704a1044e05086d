"""Drafts are what followed the last tokens before, and never more than can be of use."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.config import SamplingParams
from heddle.config.speculative import SpeculativeConfig
from heddle.config.structured import StructuredOutputsParams
from heddle.layout.kv import KVLayout
from heddle.scheduler.drafts import Drafter, DraftIndex
from heddle.scheduler.request import Request, RequestStatus


def searched(token_ids: list[int], longest: int, shortest: int, count: int) -> tuple[int, ...]:
    """The rule in words: of the longest run that stands earlier take the latest place, and read on
    from there, into what was read before."""
    for length in range(longest, shortest - 1, -1):
        run = token_ids[-length:]
        for start in range(len(token_ids) - length - 1, -1, -1):
            if token_ids[start : start + length] == run:
                text = list(token_ids)
                for at in range(count):
                    text.append(text[start + length + at])
                return tuple(text[len(token_ids) :])
    return ()


@given(
    st.lists(st.integers(0, 3), max_size=60),
    st.lists(st.integers(0, 4), max_size=8),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 6),
)
def test_drafts_are_those_of_a_plain_search(
    token_ids: list[int], cuts: list[int], shortest: int, extra: int, count: int
) -> None:
    longest = shortest + extra
    config = SpeculativeConfig(prompt_lookup_min=shortest, prompt_lookup_max=longest)
    index = DraftIndex(config)
    known: list[int] = []
    for cut in [*cuts, len(token_ids)]:
        piece = token_ids[len(known) : len(known) + cut]
        index.extend(piece)
        known += piece
        assert index.num_tokens == len(known)
        assert index.propose(count) == searched(known, longest, shortest, count)
    assert known == token_ids


@pytest.mark.parametrize(
    ("token_ids", "drafts"),
    [
        ([7, 1, 2, 3, 8, 9, 5, 1, 2, 3], (8, 9, 5)),
        ([1, 2, 3, 4, 5, 2, 3, 6, 1, 2, 3], (4, 5, 2)),  # the longer run wins over the later one
        ([1, 2, 8, 1, 2, 9, 1, 2], (9, 1, 2)),  # the latest of equals
        ([4, 5, 4, 5, 4, 5], (4, 5, 4)),  # through itself
        ([6, 6, 6], (6, 6, 6)),
        ([1, 2, 3, 3], ()),  # runs of one are too short here
        ([1, 2], ()),
        ([], ()),
    ],
)
def test_written_cases(token_ids: list[int], drafts: tuple[int, ...]) -> None:
    index = DraftIndex(SpeculativeConfig(prompt_lookup_min=2, prompt_lookup_max=4))
    index.extend(token_ids)
    assert index.propose(3) == drafts


def seconds_of_proposals(num_before: int) -> float:
    """Of the processor, in this thread, for 500 tokens behind so many others."""
    index = DraftIndex(SpeculativeConfig())
    index.extend([i * i % 509 for i in range(num_before)])
    started = time.thread_time()
    for token in range(500):
        index.extend([token])
        index.propose(4)
    return time.thread_time() - started


def test_a_token_costs_the_same_after_a_hundred_thousand() -> None:
    """A pass over the sequence per token would cost a hundred times as much there."""
    few, many = (min(seconds_of_proposals(n) for _ in range(3)) for n in (1000, 100_000))
    assert many < 20 * few


def request(prompt: list[int], outputs: list[int], max_output_tokens: int = 20) -> Request:
    """A running request whose last token is not computed yet."""
    made = Request(
        request_id=3,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(),
        max_output_tokens=max_output_tokens,
        kv_layout=KVLayout(1, 1, 4),
        output_token_ids=list(outputs),
    )
    made.num_computed_tokens = made.num_tokens - 1
    made.status = RequestStatus.RUNNING
    return made


def test_drafts_follow_the_tokens_of_a_request() -> None:
    drafter = Drafter(SpeculativeConfig(num_speculative_tokens=3))
    one = request([1, 2, 3, 4, 5, 1], [2])
    drafter.propose_drafts([one])
    assert one.draft_token_ids == (3, 4, 5)
    for token in (3, 9):
        one.append_output(token)
        one.num_computed_tokens += 1
    drafter.propose_drafts([one])
    assert one.draft_token_ids == ()
    assert drafter.num_indexes == 1


@pytest.mark.parametrize(("max_output_tokens", "count"), [(9, 4), (5, 3), (3, 1), (2, 0)])
def test_the_last_token_of_an_answer_is_never_a_draft(max_output_tokens: int, count: int) -> None:
    one = request([1, 2, 1, 2], [1], max_output_tokens)
    Drafter(SpeculativeConfig(num_speculative_tokens=4)).propose_drafts([one])
    assert one.draft_token_ids == (2, 1, 2, 1)[:count]


def test_only_requests_that_decode_get_drafts() -> None:
    drafter = Drafter(SpeculativeConfig())
    one = request([1, 2, 1, 2, 1, 2], [])
    drafter.propose_drafts([one])
    assert one.draft_token_ids
    one.num_computed_tokens = 2  # part-way through its prompt, or preempted
    drafter.propose_drafts([one])
    assert one.draft_token_ids == ()


def test_requests_that_follow_a_grammar_get_none() -> None:
    plain, formed = request([1, 2, 1, 2], [1]), request([1, 2, 1, 2], [1])
    formed.params = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
    Drafter(SpeculativeConfig()).propose_drafts([plain, formed])
    assert plain.draft_token_ids
    assert formed.draft_token_ids == ()


def test_a_request_that_ended_is_forgotten() -> None:
    drafter = Drafter(SpeculativeConfig())
    one = request([1, 2, 1, 2, 1, 2], [])
    drafter.propose_drafts([one])
    assert drafter.num_indexes == 1
    one.status = RequestStatus.FINISHED
    drafter.propose_drafts([one])
    assert (one.draft_token_ids, drafter.num_indexes) == ((), 0)
    drafter.forget(99)
