from __future__ import annotations

import pytest

from heddle.config.sampling import RequestOutputKind, SamplingParams
from heddle.engine.recovery.refused import (
    MAX_REFUSED,
    REFUSED_SECONDS,
    RefusedRequests,
    digest_of,
)
from heddle.errors import RequestError
from heddle.scheduler.request import PromptEmbeddings

PARAMS = SamplingParams(temperature=0.5, seed=3)


def test_the_digest_tells_apart_what_would_be_computed_differently() -> None:
    rows = PromptEmbeddings(data=b"12345678", row_bytes=4)
    digests = [
        digest_of([1, 23], PARAMS),
        digest_of([12, 3], PARAMS),
        digest_of([1, 23], SamplingParams(temperature=0.5, seed=4)),
        digest_of([1, 23], PARAMS, adapter="a"),
        digest_of([1, 23], PARAMS, embeddings=rows),
    ]
    assert len(set(digests)) == len(digests)
    assert {len(digest) for digest in digests} == {16}


def test_in_how_many_pieces_an_answer_is_told_makes_no_difference() -> None:
    pieces = SamplingParams(temperature=0.5, seed=3, output_kind=RequestOutputKind.DELTA)
    assert digest_of([1], PARAMS) == digest_of([1], pieces)


def test_it_is_refused_for_ten_minutes() -> None:
    now = 50.0
    refused = RefusedRequests(lambda: now)
    refused.add(b"x")
    now += REFUSED_SECONDS - 1
    with pytest.raises(RequestError, match=r"refused for 1 more seconds") as refusal:
        refused.check(lambda: b"x")
    assert refusal.value.code == "generation_failed"
    refused.check(lambda: b"y")
    now += 1
    refused.check(lambda: b"x")


def test_nobody_computes_a_digest_while_nothing_is_refused() -> None:
    def digest() -> bytes:
        raise AssertionError("not needed")

    now = 0.0
    refused = RefusedRequests(lambda: now)
    refused.check(digest)
    refused.add(b"x")
    now += REFUSED_SECONDS
    refused.check(digest)


def test_the_oldest_make_room() -> None:
    refused = RefusedRequests(lambda: 0.0)
    for number in range(MAX_REFUSED + 1):
        refused.add(b"%d" % number)
    refused.check(lambda: b"0")
    for kept in (b"1", b"%d" % MAX_REFUSED):
        with pytest.raises(RequestError):
            refused.check(lambda kept=kept: kept)  # type: ignore[misc]
