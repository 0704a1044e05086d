"""Steps that are run through at once leave everything as single steps would, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.config import ParallelConfig, ResolvedConfig
from heddle.planner.trace import TracedRequest
from heddle.simulator.prices import Price, Prices, Shape
from heddle.simulator.simulate import Simulation
from heddle.simulator.tokens import Names
from heddle.step.topology import Topology
from tests.support.fake_executor import resolved_config
from tests.support.simulated import HASHED


class Ramp:
    """Steps that take longer with every row and key, by amounts that no float holds exactly."""

    def step(self, shape: Shape) -> Price:
        seconds = self._seconds(shape.num_decodes + shape.num_prompt_rows, shape.decode_keys)
        return Price(seconds + 0.007 * shape.prompt_pairs, seconds, 1.0)

    def decodes(self, count: int, keys: np.ndarray) -> Prices:
        seconds = self._seconds(count, keys)
        return np.stack([seconds, seconds, np.ones(len(keys))], axis=1)

    def _seconds(self, rows: int, keys: Any) -> Any:
        return 0.1 + 0.03 * rows + 0.0007 * keys


requests_of = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.3, 1.7, 13.0]),
        st.integers(1, 50),
        st.integers(1, 60),
        st.lists(st.integers(0, 1), max_size=5),
    ),
    min_size=1,
    max_size=12,
)


def timed(wanted: list[tuple[float, int, int, list[int]]]) -> list[TracedRequest]:
    now, found = 0.0, []
    for gap, prompt, output, choices in wanted:
        now += gap
        hashes: list[int] = []
        for value in choices:
            hashes.append(2 * (hashes[-1] if hashes else 0) + value + 1)
        found.append(TracedRequest(prompt, output, tuple(hashes), now))
    return found


def simulate(
    resolved: ResolvedConfig, requests: list[TracedRequest], *, skips: bool
) -> tuple[Simulation, int]:
    """The simulation, and how many of its steps were made one by one."""
    made: list[int] = []
    simulation = Simulation(
        resolved,
        Topology.from_resolved(resolved),
        Ramp(),
        skips=skips,
        names=Names(HASHED),
        on_step=lambda replica, batch: made.append(replica),
    )
    simulation.run(requests)
    return simulation, len(made)


def state(simulation: Simulation) -> list[Any]:
    """All that is left in caches: which block holds what, and who is evicted first."""
    found: list[Any] = []
    for replica in simulation.replicas:
        replica.scheduler.audit()
        pool: Any = replica.cache._pool
        found.append((dict(pool._index._nodes), list(pool._cached), replica.load_at(0.0)))
    return found


@settings(max_examples=60)
@given(
    wanted=requests_of,
    num_blocks=st.integers(17, 60),
    rows=st.sampled_from([8, 64]),
    seqs=st.integers(1, 8),
    replicas=st.integers(1, 3),
    dcp=st.sampled_from([1, 2]),
)
def test_skipping_changes_nothing(
    wanted: list[tuple[float, int, int, list[int]]],
    num_blocks: int,
    rows: int,
    seqs: int,
    replicas: int,
    dcp: int,
) -> None:
    parallel = ParallelConfig(
        tensor_parallel_size=dcp,
        decode_context_parallel_size=dcp,
        data_parallel_size=replicas,
    )
    resolved = resolved_config(
        num_blocks=num_blocks, max_num_batched_tokens=rows, max_num_seqs=seqs, parallel=parallel
    )
    requests = timed(wanted)
    fast, num_made = simulate(resolved, requests, skips=True)
    slow, num_all = simulate(resolved, requests, skips=False)
    assert num_made <= num_all == slow.tally.num_steps == fast.tally.num_steps
    assert fast.tally.times == slow.tally.times
    assert fast.tally.preemptions == slow.tally.preemptions
    assert fast.tally.longest_gap == slow.tally.longest_gap
    assert fast.tally.end == slow.tally.end
    assert fast.series.describe() == slow.series.describe()
    assert fast.waits == slow.waits
    assert state(fast) == state(slow)


def test_most_steps_of_long_answers_are_skipped() -> None:
    resolved = resolved_config(num_blocks=200, max_model_len=512)
    requests = [TracedRequest(9, 200, (), 0.0), TracedRequest(20, 180, (), 30.0)]
    simulation, num_made = simulate(resolved, requests, skips=True)
    assert simulation.tally.num_steps > 200
    assert num_made < 12


def test_a_run_stops_before_blocks_are_missing() -> None:
    resolved = resolved_config(num_blocks=17, max_num_batched_tokens=64)
    requests = [TracedRequest(20, 30, (), 0.0), TracedRequest(20, 30, (), 0.0)]
    simulation, num_made = simulate(resolved, requests, skips=True)
    assert simulation.tally.preemptions > 0
    assert num_made < simulation.tally.num_steps
