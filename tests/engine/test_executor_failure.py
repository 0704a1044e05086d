"""The first cause is named, with its coordinates, and not buried under what followed from it."""

from __future__ import annotations

import pytest

from heddle.config import ParallelConfig
from heddle.engine.executors.base import check_agreement
from heddle.engine.executors.failure import (
    Failure,
    describe_rank,
    failure_of,
    first_cause,
    start_error,
    step_error,
)
from heddle.errors import (
    CollectiveTimeout,
    ConfigError,
    ModelFileError,
    PlanMismatch,
    RankFailed,
    TopologyError,
)
from heddle.step.batch import RankReply
from tests.support.fake_worker import fake_batch

PARALLEL = ParallelConfig(
    tensor_parallel_size=4, prefill_context_parallel_size=2, decode_context_parallel_size=4
)


def raised(rank: int, error: Exception) -> Failure:
    try:
        raise error
    except Exception as caught:
        return failure_of(rank, caught)


@pytest.mark.parametrize(
    ("rank", "words"),
    [(0, "rank0 tp0 pcp0 dcp0"), (4, "rank4 tp0 pcp1 dcp1"), (5, "rank5 tp1 pcp1 dcp3")],
)
def test_rank_is_described_by_its_coordinates(rank: int, words: str) -> None:
    # DCP 4 of TP4 x PCP2 is [R0 R4 R1 R5] [R2 R6 R3 R7].
    assert describe_rank(PARALLEL, rank) == words


def test_a_lost_peer_is_not_the_cause() -> None:
    follow_up = raised(0, RankFailed("connection closed by peer"))
    cause = raised(5, ZeroDivisionError("division by zero"))
    assert first_cause([follow_up, cause]) is cause
    assert first_cause([follow_up]) is follow_up


def test_message_puts_the_cause_first_and_one_line_for_each_follow_up() -> None:
    failures = [
        raised(0, RankFailed("connection closed\nby peer")),
        raised(5, ZeroDivisionError("division by zero")),
    ]
    error = step_error(PARALLEL, failures, epoch=2, step=7)
    lines = str(error).splitlines()
    assert type(error) is RankFailed
    assert lines[0] == (
        "rank5 tp1 pcp1 dcp3 failed in step 7 of epoch 2: ZeroDivisionError: division by zero"
    )
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == "then rank0 tp0 pcp0 dcp0: RankFailed: connection closed"
    assert isinstance(error.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("kind", [PlanMismatch, CollectiveTimeout])
def test_a_step_keeps_the_class_of_a_mismatch_and_a_timeout(kind: type[Exception]) -> None:
    assert type(step_error(PARALLEL, [raised(1, kind("x"))], 0, 3)) is kind


def test_a_start_keeps_the_class_of_what_the_caller_can_mend() -> None:
    error = start_error(PARALLEL, [raised(1, ModelFileError("a.gguf: truncated"))])
    assert type(error) is ModelFileError
    assert str(error) == "a.gguf: truncated [rank1 tp1 pcp0 dcp0]".replace("dcp0", "dcp2")
    assert type(start_error(PARALLEL, [raised(0, TopologyError(["no", "never"]))])) is ConfigError
    assert type(start_error(PARALLEL, [raised(0, OSError("disk"))])) is RankFailed


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (RankReply(epoch=1, step=4, digest=9, coverage=(0,)), "rank 1 answered with epoch 1"),
        (RankReply(epoch=0, step=5, digest=9, coverage=(0,)), "rank 1 answered with step 5"),
        (RankReply(epoch=0, step=4, digest=8, coverage=(0,)), "rank 1 answered with digest 8"),
    ],
)
def test_replies_that_differ_in_any_word_are_refused(reply: RankReply, words: str) -> None:
    good = RankReply(epoch=0, step=4, digest=9, coverage=(0,))
    check_agreement(fake_batch(4), 9, [good, good])
    with pytest.raises(PlanMismatch, match=words):
        check_agreement(fake_batch(4), 9, [good, reply])
