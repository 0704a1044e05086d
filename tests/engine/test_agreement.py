"""Ranks and driver agree on a step, or nothing of it runs and the difference is shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from heddle.config import ResolvedConfig
from heddle.engine.executors.messages import Start
from heddle.engine.executors.processes import ProcessesExecutor
from heddle.engine.executors.threads import ThreadsExecutor
from heddle.errors import ConfigError, PlanMismatch
from heddle.runner.worker import RankWorker
from heddle.step.batch import GlobalBatch, RankReply, ScheduledRequest
from heddle.step.packed import pack_table
from heddle.step.plan import plan
from heddle.step.topology import Topology
from tests.support.fake_worker import FAKE, fake_config
from tests.support.flagship import Case, resolve_case
from tests.support.tiny import build_tiny

LAYOUT = Case(sizes=(2, 1, 2))


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> ResolvedConfig:
    folder = build_tiny(tmp_path_factory.mktemp("agreement"), "llama-8-2")
    return dataclasses.replace(resolve_case(Path(folder), LAYOUT), kernels="torch", backend="torch")


def batch_of(topology: Topology, step: int) -> GlobalBatch:
    requests = tuple(
        ScheduledRequest(
            request_id=id_,
            token_ids=(5 + id_, 6, 7),
            num_computed_tokens=0,
            packed_tables=(pack_table([1 + id_]),),
            layout_fingerprint=topology.fingerprint(),
        )
        for id_ in (0, 1)
    )
    return GlobalBatch(epoch=0, step=step, layout_id=topology.layout_id, requests=requests)


Change = Callable[[GlobalBatch, int], tuple[GlobalBatch, int] | None]


class Tampered(ThreadsExecutor):
    """What rank 1 hears, or what it answers, is another thing."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        heard: Callable[[GlobalBatch], GlobalBatch] = lambda batch: batch,
        answered: Callable[[RankReply], RankReply] = lambda reply: reply,
    ) -> None:
        super().__init__(resolved)
        self.heard, self.answered = heard, answered

    def _execute(self, step: Any, rank: int) -> RankReply:
        if rank != 1:
            return super()._execute(step, rank)
        reply = super()._execute(dataclasses.replace(step, batch=self.heard(step.batch)), rank)
        return self.answered(reply)


def run(executor: Tampered, numbers: tuple[int, ...] = (0,)) -> tuple[RankReply, ...]:
    topology = Topology.from_resolved(executor._resolved)
    replies: tuple[RankReply, ...] = ()
    for number in numbers:
        batch = batch_of(topology, number)
        replies = executor.execute(batch, plan(batch, topology).digest)
    return replies


def test_equal_ranks_make_equal_calls(resolved: ResolvedConfig) -> None:
    with Tampered(resolved) as executor:
        first = run(executor, (0, 1))
    hashes = [reply.call_hashes for reply in first]
    assert hashes[0] == hashes[1]
    assert set(hashes[0]) >= {"tp"}
    assert all(hashes[0].values())
    assert [reply.num_bad_rows for reply in first] == [0, 0]


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((0, 2), "got step 2 of epoch 0 with step 2 and expects 1: a step before it was lost"),
        ((0, 1, 1), "with step 1 and expects 2: it came twice, or late"),
    ],
)
def test_a_step_that_was_lost_or_doubled_runs_nowhere(
    resolved: ResolvedConfig, numbers: tuple[int, ...], words: str
) -> None:
    with Tampered(resolved) as executor:
        run(executor, numbers[:-1])
        with pytest.raises(PlanMismatch, match=words) as caught:
            run(executor, numbers[-1:])
    assert caught.value.kind == "step"


@pytest.mark.parametrize(("field", "kind"), [("epoch", "epoch"), ("layout_id", "layout_id")])
def test_a_stale_step_is_refused(resolved: ResolvedConfig, field: str, kind: str) -> None:
    def stale(batch: GlobalBatch) -> GlobalBatch:
        return msgspec.structs.replace(batch, **{field: getattr(batch, field) + 1})

    words = r"rank1 tp1 pcp0 dcp1 failed in step 0"
    with (
        Tampered(resolved, heard=stale) as executor,
        pytest.raises(PlanMismatch, match=words) as caught,
    ):
        run(executor)
    assert caught.value.kind == kind


def test_two_readings_of_a_step_are_shown_side_by_side(resolved: ResolvedConfig) -> None:
    def changed(batch: GlobalBatch) -> GlobalBatch:
        request = msgspec.structs.replace(batch.requests[1], packed_tables=(pack_table([4]),))
        return msgspec.structs.replace(batch, requests=(batch.requests[0], request))

    with (
        Tampered(resolved, heard=changed) as executor,
        pytest.raises(PlanMismatch, match="rank 1 derives plan 0x") as caught,
    ):
        run(executor)
    assert caught.value.kind == "plan"
    lines = str(caught.value).splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("what differs"))
    table = lines[head + 1 : head + 4]
    assert table[0].split() == ["request", "1", "blocks", "of", "group", "0", "2", "4"]
    assert [line.split()[:2] for line in table] == [["request", "1"]] * 3
    assert not [line for line in lines[head:] if line.startswith("request 0")]


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"step": 3}, "step", "rank 1 answered with step 3, the driver sent 0"),
        ({"epoch": 3}, "epoch", "rank 1 answered with epoch 3, the driver sent 0"),
        ({"digest": 3}, "plan", "rank 1 answered with digest 3, the driver sent "),
    ],
)
def test_an_answer_to_another_step_is_no_answer(
    resolved: ResolvedConfig, change: dict[str, int], kind: str, words: str
) -> None:
    def other(reply: RankReply) -> RankReply:
        return msgspec.structs.replace(reply, **change)

    with (
        Tampered(resolved, answered=other) as executor,
        pytest.raises(PlanMismatch, match=words) as caught,
    ):
        run(executor)
    assert caught.value.kind == kind


def test_the_worker_of_every_executor_is_the_one_that_looks() -> None:
    from heddle.engine.executors.base import RANK_WORKER, load_worker_factory

    assert load_worker_factory(RANK_WORKER) is RankWorker


class OneRankOtherwise(ProcessesExecutor):
    """Rank 1 is started with another setting."""

    def _start_of(self, rank: int, folder: str) -> Start:
        start = super()._start_of(rank, folder)
        if rank != 1:
            return start
        other = dataclasses.replace(start.resolved, seed=7)
        return msgspec.structs.replace(start, resolved=other)


@pytest.mark.dist
def test_a_rank_that_was_started_with_another_setting_is_refused_with_the_difference() -> None:
    executor = OneRankOtherwise(fake_config(tp=2), worker=FAKE)
    words = r"this rank was started with other .*: seed is 7 here, 0 on the driver; .* \[rank1 tp1"
    with pytest.raises(ConfigError, match=words):
        executor.start()
