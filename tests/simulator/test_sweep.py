from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.planner.search import Search
from heddle.planner.trace import TracedRequest
from heddle.planner.workload import Workload
from heddle.simulator.outcome import Job, Targets, run_job
from heddle.simulator.sweep import bounds_of, choose, edges, entries, front, run_jobs
from tests.support.planned import layout_of, settings_for

REQUESTS = [TracedRequest(900 + n, 20, (), n / 50) for n in range(30)]


def job_of(tp: int = 1, **fields: Any) -> Job:
    settings = settings_for(devices=4, window=8192)
    values = {
        "requests": REQUESTS,
        "targets": Targets(ttft=1.0),
        "parallel": layout_of(tp),
        **fields,
    }
    return Job(settings=settings, **values)


def without_wall(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name != "wall_s"}


points = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=9)


@given(points)
def test_nobody_on_a_front_is_beaten_and_everybody_else_is(found: list[tuple[int, int]]) -> None:
    on_front = {found[at] for at in front(found)}
    assert bool(on_front) == bool(found)
    for much, late in found:
        beaten = any((m >= much and t < late) or (m > much and t <= late) for m, t in on_front)
        assert beaten != ((much, late) in on_front)


def test_processes_give_the_answers_of_one() -> None:
    jobs = [job_of(1), job_of(2)]
    together = run_jobs(jobs, num_processes=2)
    for job, answer in zip(jobs, together, strict=True):
        assert without_wall(run_job(job)) == without_wall(answer)


def test_a_slow_device_is_later_and_bounds_hold_the_middle() -> None:
    job = job_of()
    low, high = (run_job(each) for each in edges(job))
    mid = run_job(job)
    bounds = bounds_of(low, high, mid)
    for part in ("p50", "p90", "p99"):
        # Gaps need not be ordered: on a slow device other requests stand beside each other.
        for name in ("ttft", "itl", "e2e"):
            least, most = bounds[name][part]
            assert least <= mid[name][part] <= most
        assert bounds["e2e"][part] == [high["e2e"][part], low["e2e"][part]]
        assert high["e2e"][part] < mid["e2e"][part] < low["e2e"][part]
    assert bounds["tok_s"][0] <= mid["tok_s"] <= bounds["tok_s"][1]


def test_a_sweep_looks_at_the_best_of_each_kind() -> None:
    settings = settings_for(devices=4, window=8192)
    load = Workload(prompt_len=900, output_len=20, concurrency=16)
    candidates = Search(settings, load).run().candidates
    chosen = choose(candidates, most=6)
    assert len(chosen) == 6 < len(candidates)
    predictions = [each.prediction for each in candidates if each.prediction is not None]
    found = [each.prediction for each in chosen if each.prediction is not None]
    assert max(p.tok_s for p in found) == max(p.tok_s for p in predictions)
    assert min(p.ttft for p in found) == min(p.ttft for p in predictions)
    assert min(p.tpot for p in found) == min(p.tpot for p in predictions)
    assert len(choose(candidates, most=99)) == len(predictions)
    answers = [run_job(job_of(parallel=each.parallel)) for each in chosen[:3]]
    told = entries(chosen[:3], answers)
    assert told[0]["on_front"]
    late = {entry["tok_s_per_device"]: entry["ttft"] for entry in told}
    assert late == {answer["tok_s_per_device"]: answer["ttft"] for answer in answers}
    assert {entry["devices"] for entry in told} == {each.num_devices for each in chosen[:3]}


def test_an_answer_of_nothing_is_on_no_front_beside_one_of_something() -> None:
    assert list(front([(0.0, float("inf")), (5.0, 1.0)])) == [1]


@pytest.mark.parametrize("count", [0, 1])
def test_few_jobs_need_no_process(count: int) -> None:
    assert len(run_jobs([job_of()] * count)) == count
