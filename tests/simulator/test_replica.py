from __future__ import annotations

from typing import Any

from heddle.planner.trace import TracedRequest
from heddle.scheduler.batch import ScheduledBatch, ScheduledPart
from heddle.simulator.prices import UnitClock
from heddle.simulator.replica import SimulatedReplica, shape_of
from heddle.simulator.tally import Tally, Times
from heddle.simulator.tokens import Names, RunTokens
from heddle.step.topology import Topology
from tests.support.fake_executor import resolved_config


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
