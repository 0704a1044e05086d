"""One token through ranks, to see that they can: a canary.

A canary is a sequence that the scheduler knows and nobody waits for: no request has it, so nothing
of it reaches an answer or a metric of requests. It runs in one step, as the step of any other
request would. New ranks are proven by it before they are given requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from heddle.config.sampling import SamplingParams
from heddle.engine.executors.base import Executor, Submission
from heddle.engine.replica import Replica
from heddle.kvcache.keys import CacheScope
from heddle.scheduler.request import Request
from heddle.step.batch import AdapterChange

FIRST_ID = 1 << 62
"""Of canaries; sequences of requests count from 0."""
TOKEN_ID = 1
PARAMS = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
SCOPE = CacheScope(salt="canary")
"""Shares no cached block with a request."""


def create_canary(replica: Replica, number: int) -> Request:
    """One for a replica, not admitted.

    Args:
        replica: that will run it.
        number: how many it had before.
    """
    return Request(
        request_id=FIRST_ID + number,
        prompt_token_ids=(TOKEN_ID,),
        params=PARAMS,
        max_output_tokens=1,
        kv_layout=replica.cache.layout,
        cache_scope=SCOPE,
    )


def prove_ranks(replicas: Sequence[Replica], executor: Executor) -> None:
    """Run a canary in every replica at once, with the changes that wait for its next step.

    Args:
        replicas: idle.
        executor: of their ranks, started.
    Raises:
        RankFailed, PlanMismatch: ranks cannot.
    """
    canaries = [create_canary(replica, 0) for replica in replicas]
    steps = {}
    for replica, canary in zip(replicas, canaries, strict=True):
        replica.admit(canary, ())
        step = replica.begin_step()
        assert step is not None  # an idle replica has room for one token
        steps[replica.index] = step
    _run(replicas, executor, steps)
    for replica, canary in zip(replicas, canaries, strict=True):
        replica.forget(canary)


def prove_adapter(replicas: Sequence[Replica], executor: Executor, change: AdapterChange) -> None:
    """Have ranks take one adapter in, and nothing else.

    Args:
        replicas: idle.
        executor: of their ranks, started.
        change: brings the adapter.
    Raises:
        RankFailed, PlanMismatch: ranks cannot.
    """
    for replica in replicas:
        replica.change_adapters(change)
    _run(replicas, executor, {each.index: each.begin_empty_step() for each in replicas})


def _run(replicas: Sequence[Replica], executor: Executor, steps: Mapping[int, Submission]) -> None:
    executor.submit(steps)
    for replica in replicas:
        replica.note_sent()
    for replica in replicas:
        replica.end_step(executor.collect(replica.index), lambda number: {number})
