from __future__ import annotations

import pytest

from heddle.config import ParallelConfig
from heddle.errors import ConfigError
from heddle.layout.rules import validate
from heddle.planner.search import Found, Search, degree_flags
from heddle.planner.workload import Workload
from tests.support.planned import settings_for

LOAD = Workload(prompt_len=8000, output_len=100, concurrency=4)


def found_for(
    name: str = "llama-3.1-8b", device: str = "H200", devices: int = 4, **fields
) -> Found:
    search = {"load": LOAD, **fields}
    return Search(settings=settings_for(name, device, devices), **search).run()


def test_every_layout_is_a_candidate_or_refused() -> None:
    """Planes of 1 to 4 devices, every cut of each, every DCP size up to the plane."""
    found = found_for()
    seen = {
        degree_flags(entry.parallel).partition(" -dp")[0]
        for entry in (*found.candidates, *found.refused)
    }
    expected = {
        f"-tp {tp} -pcp {plane // tp} -dcp {dcp}"
        for plane in range(1, 5)
        for tp in range(1, plane + 1)
        if plane % tp == 0
        for dcp in range(1, plane + 1)
    }
    assert seen == expected
    assert len(found.candidates) + len(found.refused) == len(expected) == 23


def test_a_refusal_carries_the_rule_and_the_nearest_legal_layouts() -> None:
    found = found_for()
    assert found.refused
    for entry in found.refused:
        verdict = validate(entry.parallel, model=settings_for().model)
        assert not verdict.legal
        assert entry.reasons == verdict.reasons
        assert entry.nearest == tuple(near.flags for near in verdict.nearest)


def test_devices_that_are_left_make_replicas_and_cores_make_threads() -> None:
    devices = {(c.parallel.world_size, c.num_devices) for c in found_for().candidates}
    assert devices == {(3, 3), (4, 4)}
    on_cores = found_for("qwen3-0.6b", "CPU").candidates
    assert {c.parallel.data_parallel_size for c in on_cores} == {1}
    assert {c.engine.resolved.num_threads for c in on_cores} == {1, 2, 4}


def test_the_best_throughput_comes_first() -> None:
    rates = [c.prediction.tok_s for c in found_for().candidates if c.prediction is not None]
    assert len(rates) > 5
    assert rates == sorted(rates, reverse=True)


def test_a_fixed_degree_is_kept() -> None:
    base = ParallelConfig(tensor_parallel_size=2, data_parallel_size=1)
    fixed = frozenset({"tensor_parallel_size", "data_parallel_size"})
    found = found_for(base=base, fixed=fixed)
    assert {c.parallel.tensor_parallel_size for c in found.candidates} == {2}
    assert {c.parallel.data_parallel_size for c in found.candidates} == {1}


def test_experts_are_cut_and_dealt() -> None:
    found = found_for("qwen3-30b-a3b", devices=2)
    dealt = {c.parallel.enable_expert_parallel for c in found.candidates}
    assert dealt == {False, True}


def test_stages_are_tried_where_nothing_fits_without_them() -> None:
    found = found_for("llama-3.1-405b", devices=16, base=ParallelConfig(tensor_parallel_size=1))
    stages = {c.parallel.pipeline_parallel_size for c in found.candidates}
    assert stages == {1}
    only = frozenset({"tensor_parallel_size"})
    found = found_for("llama-3.1-405b", devices=16, fixed=only)
    assert {c.parallel.pipeline_parallel_size for c in found.candidates} == {8, 16}
    assert any("a rank needs" in entry.reasons[0] for entry in found.refused)


def test_what_does_not_fit_is_told_what_does() -> None:
    found = found_for("llama-3.1-70b", "H100", 8)
    heavy = [entry for entry in found.refused if "a rank needs" in entry.reasons[0]]
    fitting = {degree_flags(c.parallel) for c in found.candidates}
    assert heavy
    for entry in heavy:
        assert set(entry.nearest) <= fitting
        assert entry.nearest


def test_a_request_that_does_not_fit_is_served_by_nobody() -> None:
    load = Workload(prompt_len=200_000, output_len=1, concurrency=1)
    found = found_for(load=load)
    assert found.candidates
    assert all(c.prediction is None for c in found.candidates)


@pytest.mark.parametrize("devices", [0, -3, 1 << 17])
def test_a_number_of_devices_that_nobody_has_is_refused(devices: int) -> None:
    with pytest.raises(ConfigError, match=f"devices={devices} is not legal"):
        found_for(devices=devices)
