"""How far the grid is from the model, and that it is one function however it is asked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.planner.batches import Rows
from heddle.planner.cost import CostModel
from heddle.planner.memory import PlannedEngine
from heddle.simulator.prices import PriceTable, Shape, UnitClock
from tests.support.planned import engine_for, settings_for

ENGINES = {
    "tp 2": lambda: engine_for(settings_for(devices=2, window=32768), 2),
    "pcp 4 dcp 4": lambda: engine_for(settings_for(devices=8, window=32768), 2, 4, 4),
    "experts dealt": lambda: engine_for(
        settings_for("deepseek-v3", devices=32, window=32768), 8, 2, 8, enable_expert_parallel=True
    ),
    "windows": lambda: engine_for(settings_for("gpt-oss-20b", devices=2, window=32768), 2, 1, 2),
}


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> PlannedEngine:
    return ENGINES[request.param]()


def shapes(engine: PlannedEngine, count: int) -> list[tuple[Shape, list[Rows]]]:
    """Steps as a scheduler makes them, and how they are grouped."""
    draw = np.random.default_rng(5)
    found = []
    while len(found) < count:
        decodes = [Rows(int(k), 1) for k in draw.integers(50, 20000, draw.integers(0, 100))]
        pieces = []
        if draw.random() < 0.6 or not decodes:
            rows = int(draw.integers(2, engine.chunk))
            pieces = [Rows(int(draw.integers(0, 30000 - rows)), rows)]
        shape = Shape(
            len(decodes),
            sum(part.cached for part in decodes),
            sum(part.new for part in pieces),
            sum(part.new * part.cached for part in pieces),
        )
        found.append((shape, [*decodes, *pieces]))
    return found


def test_prices_are_near_those_of_the_model(engine: PlannedEngine) -> None:
    model = CostModel(engine)
    table = PriceTable(model)
    errors = []
    for shape, parts in shapes(engine, 60):
        exact = model.step(parts).seconds
        errors.append(abs(table.step(shape).seconds / exact - 1))
    assert max(errors) < 0.15
    assert sum(errors) / len(errors) < 0.03


def test_at_the_nodes_prices_are_the_models(engine: PlannedEngine) -> None:
    model = CostModel(engine)
    table = PriceTable(model)
    for decodes, keys, rows, before in [(1, 128, 0, 0), (8, 2048, 0, 0), (0, 0, 64, 0)]:
        parts = [Rows(keys, 1)] * decodes + ([Rows(before, rows)] if rows else [])
        cost = model.step(parts)
        found = table.step(Shape(decodes, decodes * keys, rows, rows * before))
        assert found.seconds == cost.seconds
        assert found.pace == pytest.approx(cost.slowest_stage)


@given(st.integers(1, 128), st.lists(st.integers(0, 4_000_000), min_size=1, max_size=20))
def test_many_steps_are_priced_as_each_alone(count: int, keys: list[int]) -> None:
    together = TABLE.decodes(count, np.array(keys, dtype=np.int64))
    for row, total in zip(together.tolist(), keys, strict=True):
        assert tuple(row) == TABLE.step(Shape(count, total))


TABLE = PriceTable(CostModel(engine_for(settings_for(devices=2, window=32768), 2)))


def test_more_work_never_takes_less() -> None:
    found = [TABLE.step(Shape(20, keys, 300, 10_000)) for keys in range(0, 600_000, 7919)]
    seconds = [price.seconds for price in found]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-1]


def test_a_node_is_asked_of_the_model_once() -> None:
    TABLE.step(Shape(20, 7919, 300, 10_000))
    asked = TABLE.num_nodes
    TABLE.step(Shape(20, 7919, 300, 10_000))
    assert TABLE.num_nodes == asked


def test_with_the_clock_off_a_step_takes_one() -> None:
    assert UnitClock().step(Shape(3, 99, 8, 0)) == (1.0, 1.0, 11.0)
    assert UnitClock().decodes(4, np.array([5, 9])).tolist() == [[1.0, 1.0, 4.0]] * 2
