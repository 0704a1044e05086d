from __future__ import annotations

import pytest

from heddle.config import ParallelConfig
from heddle.engine.driver import Driver
from heddle.engine.recovery.canary import FIRST_ID, prove_adapter, prove_ranks
from heddle.errors import RankFailed
from heddle.step.batch import AdapterChange
from tests.engine.test_driver import continue_without_eos, drain, greedy, ids
from tests.engine.test_driver_replicas import MOE
from tests.support.failing_executor import World
from tests.support.fake_executor import FakeExecutor, resolved_config

CHANGE = AdapterChange(slot=2, path="/adapter")


def engine(dp: int = 1, pp: int = 1, *, lockstep: bool = False) -> tuple[Driver, FakeExecutor]:
    parallel = ParallelConfig(
        data_parallel_size=dp, pipeline_parallel_size=pp, enable_expert_parallel=lockstep
    )
    resolved = resolved_config(parallel=parallel, moe=MOE if lockstep else None)
    executor = FakeExecutor(resolved)
    return Driver(resolved, executor, None), executor


SHAPES = [(1, 1, False), (2, 1, False), (1, 2, False), (2, 2, True)]


@pytest.mark.parametrize(("dp", "pp", "lockstep"), SHAPES)
def test_every_replica_runs_one_token_at_once_and_nothing_of_it_stays(
    dp: int, pp: int, lockstep: bool
) -> None:
    driver, executor = engine(dp, pp, lockstep=lockstep)
    driver.replicas[0].change_adapters(CHANGE)
    prove_ranks(driver.replicas, executor)
    (begun,) = executor.rounds
    assert sorted(begun) == list(range(dp))
    assert sorted(executor.collected) == [(replica, 0) for replica in range(dp)]
    for batch, _ in begun.values():
        (request,) = batch.requests
        assert request.request_id >= FIRST_ID
        assert len(request.token_ids) == 1
    assert begun[0][0].adapter_changes == (CHANGE,)
    for replica in driver.replicas:
        assert replica.num_under_way == replica.load == 0
        assert not replica.scheduler.has_work
        assert replica.cache.num_available_blocks == replica.cache.num_usable_blocks
    driver.audit()
    driver.add(ids(3, 4), greedy(5))
    (output,) = drain(driver).values()
    assert list(output.outputs[0].token_ids) == continue_without_eos([3, 4], 5)


@pytest.mark.parametrize(("dp", "pp", "lockstep"), SHAPES)
def test_an_adapter_comes_to_every_replica_without_rows(dp: int, pp: int, lockstep: bool) -> None:
    driver, executor = engine(dp, pp, lockstep=lockstep)
    prove_adapter(driver.replicas, executor, CHANGE)
    (begun,) = executor.rounds
    assert [batch.adapter_changes for batch, _ in begun.values()] == [(CHANGE,)] * dp
    assert [batch.requests for batch, _ in begun.values()] == [()] * dp
    assert not any(replica.has_changes or replica.num_under_way for replica in driver.replicas)


def test_ranks_that_cannot_are_found() -> None:
    world = World(resolved_config(), due=["collect"])
    driver = world.driver()
    with pytest.raises(RankFailed, match="failed at collect"):
        prove_ranks(driver.replicas, world.made[-1])
