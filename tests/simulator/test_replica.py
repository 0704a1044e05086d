from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from heddle.config import ParallelConfig
from heddle.engine.replica import Replica
from heddle.kvcache.manager import KVCacheManager
from heddle.planner.trace import TracedRequest
from heddle.scheduler.batch import ScheduledBatch, ScheduledPart
from heddle.simulator.prices import UnitClock
from heddle.simulator.replica import SimulatedReplica, create_cache, create_pacer, shape_of
from heddle.simulator.tally import Tally, Times
from heddle.simulator.tokens import Names, RunTokens
from heddle.step.topology import Topology
from tests.support.fake_executor import resolved_config

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dcp": {"parallel": ParallelConfig(tensor_parallel_size=2, decode_context_parallel_size=2)},
    "rotated": {
        "parallel": ParallelConfig(
            tensor_parallel_size=2, decode_context_parallel_size=2, cp_start_rank_rotation=True
        )
    },
    "pins": {"max_pinned_tokens": 32},
    "paced": {"target_itl_ms": 40.0},
}


def facts(cache: KVCacheManager) -> tuple[Any, ...]:
    """What decides how a cache accounts."""
    return (
        cache.groups,
        cache.num_usable_blocks,
        cache.usable_tokens,
        cache.max_step_rows,
        cache.state_unit,
        cache.states_per_sequence,
        cache.has_states,
        cache._num_start_ranks,
        cache._is_caching,
        cache._pins.max_blocks,
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_it_accounts_as_the_engines_replica_does(name: str) -> None:
    resolved = resolved_config(**CONFIGS[name])
    for enables in (True, False) if name != "pins" else (True,):
        each = replace(resolved, cache=replace(resolved.cache, enable_prefix_caching=enables))
        topology = Topology.from_resolved(each)
        theirs = Replica(0, each, topology)
        assert facts(create_cache(each, topology)) == facts(theirs.cache)
        assert vars(create_pacer(each)) == vars(theirs.pacer)


def replica_of(tally: Tally, **config: Any) -> SimulatedReplica:
    resolved = resolved_config(**config)
    topology = Topology.from_resolved(resolved)
    return SimulatedReplica(0, resolved, topology, UnitClock(), tally, lambda number: None)


def test_a_request_runs_to_its_length_and_is_forgotten() -> None:
    tally = Tally()
    replica = replica_of(tally)
    tally.times[5] = Times(arrival=0.0, prompt_len=7)
    replica.add(replica.create(5, RunTokens([(3, 7)], answer=9), room=3))
    assert replica.load_at(0.0) == 7
    ended: list[int] = []
    for now in range(1, 4):
        step = replica.choose(now - 1.0)
        assert step is not None
        ended += replica.finish(step, float(now))
    assert ended == [5]
    assert tally.times[5].num_tokens == 3
    assert (tally.times[5].first, tally.times[5].end) == (1.0, 3.0)
    assert replica.load_at(3.0) == 0
    assert replica.choose(3.0) is None
    # What it computed can be found, also past whole blocks; what it answered is in no prompt.
    assert replica.num_hit_tokens(RunTokens([(3, 7), (4, 9)], answer=1)) == 7
    assert replica.num_hit_tokens(RunTokens([(2, 7)], answer=1)) == 0


def test_a_shape_counts_rows_keys_and_pairs() -> None:
    replica = replica_of(Tally())
    requests = [replica.create(n, Names().stand_ins(TRACED, n), 9) for n in range(3)]
    parts = (
        ScheduledPart(requests[0], 40, 1, True),
        ScheduledPart(requests[1], 30, 10, True),
        ScheduledPart(requests[2], 5, 1, False),
    )
    found = shape_of(ScheduledBatch(parts=parts))
    assert found == (1, 40, 11, 30 * 10 + 5)


TRACED = TracedRequest(50, 9)
