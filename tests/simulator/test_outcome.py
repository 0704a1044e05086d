from __future__ import annotations

import gc
import math
from typing import Any

import pytest

from heddle.errors import ConfigError
from heddle.planner.batches import Rows
from heddle.planner.cost import CostModel
from heddle.planner.trace import TracedRequest, repeated_share
from heddle.simulator.outcome import Job, Targets, measure, run_job
from heddle.simulator.tally import Times
from tests.support.planned import engine_for, layout_of, settings_for


def answer_of(requests: list[TracedRequest], **fields: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"targets": Targets(), "parallel": layout_of(1), **fields}
    settings = values.pop("settings", settings_for(devices=1, window=8192))
    return run_job(Job(settings=settings, requests=requests, **values))


def test_one_request_alone_takes_what_its_steps_take() -> None:
    settings = settings_for(devices=1, window=8192)
    # 1,024 rows are a node of the grid, as are answers read at whole nodes of keys.
    found = answer_of([TracedRequest(1024, 3, (), 0.0)], settings=settings)
    model = CostModel(engine_for(settings))
    first = model.step([Rows(0, 1024)]).seconds
    second, third = (model.step([Rows(1024 + n, 1)]).seconds for n in range(2))
    assert found["ttft"]["p50"] == pytest.approx(first, rel=1e-6)
    assert found["e2e"]["max"] == pytest.approx(first + second + third, rel=1e-3)
    assert found["itl"]["mean"] == pytest.approx((second + third) / 2, rel=1e-3)
    assert (found["steps"], found["finished"], found["rejects"]) == (3, 1, 0)
    assert found["duration_s"] == found["e2e"]["max"]
    assert found["tok_s"] == pytest.approx(3 / found["duration_s"])
    assert found["ranks"]["rows"] == [1024 + 2]
    assert found["limited_by"] == pytest.approx(
        {"blocks": 0, "seats": 0, "prefill_slots": 0, "rows": 0, "nothing": 1}
    )
    assert gc.isenabled()


def test_far_apart_requests_hit_what_the_trace_says() -> None:
    requests = [
        TracedRequest(1500, 4, (1, 2, 3), 0.0),
        TracedRequest(1600, 4, (1, 2, 9, 8), 50.0),
        TracedRequest(700, 4, (1, 7), 100.0),
        TracedRequest(512, 4, (1,), 150.0),
    ]
    found = answer_of(requests)
    assert found["hit_rate"] == repeated_share(requests) == (1024 + 512 + 511) / 4312
    assert answer_of(requests, settings=_uncached())["hit_rate"] == 0.0


def _uncached() -> Any:
    from heddle.config import CacheConfig

    return settings_for(devices=1, window=8192, cache=CacheConfig(enable_prefix_caching=False))


def test_what_can_never_fit_is_counted_and_not_raised() -> None:
    requests = [
        TracedRequest(10**7, 4, (), 0.0),
        TracedRequest(8192, 4, (), 0.0),
        TracedRequest(8190, 400, (), 0.1),
        TracedRequest(5, 0, (), 0.2),
    ]
    found = answer_of(requests, targets=Targets(ttft=1e-9))
    assert found["reject_reasons"] == {"too_long": 2, "queue_full": 0}
    assert (found["requests"], found["finished"], found["clipped"]) == (4, 2, 1)
    assert found["goodput"] == pytest.approx(1 / found["duration_s"])  # the one without a token
    assert found["targets"]["kept_share"] == 0.25


def test_a_full_queue_turns_requests_away_unless_there_is_no_door() -> None:
    from heddle.config import SchedulerConfig

    settings = settings_for(devices=1, window=8192)
    narrow = settings.__class__(
        **{
            **{name: getattr(settings, name) for name in ("model", "model_name", "sheet", "dtype")},
            "num_devices": 1,
            "scheduler": SchedulerConfig(max_num_seqs=1, max_num_queued_reqs=2),
            "max_model_len": 8192,
        }
    )
    requests = [TracedRequest(100, 50, (), 0.001 * n) for n in range(10)]
    found = answer_of(requests, settings=narrow)
    # One runs when the second comes, two wait, and nobody ends before the last has come.
    assert found["reject_reasons"] == {"too_long": 0, "queue_full": 7}
    assert found["finished"] == 3
    everybody = answer_of(requests, settings=narrow, has_door=False)
    assert (everybody["rejects"], everybody["finished"]) == (0, 10)
    assert everybody["limited_by"]["seats"] > 0.8


def test_ranks_share_what_is_stored_and_replicas_what_is_computed() -> None:
    settings = settings_for(devices=4, window=8192)
    parallel = layout_of(2, 1, 2, data_parallel_size=2)
    requests = [TracedRequest(1000, 100, (), 0.0), TracedRequest(501, 100, (), 0.001)]
    found = answer_of(requests, settings=settings, parallel=parallel)["ranks"]
    assert len(found["rows"]) == len(found["kv_tokens"]) == 4
    assert found["rows"][0] == found["rows"][1] > found["rows"][2] == found["rows"][3] > 0
    mean = sum(found["rows"]) / 4
    assert found["imbalance"] == pytest.approx(max(found["rows"]) / mean, rel=1e-3)
    first, second = found["kv_tokens"][:2]
    assert 0 <= first - second <= 1  # runs of one token are dealt in turn
    assert 1000 <= first + second <= 1100
    assert 501 <= sum(found["kv_tokens"][2:]) <= 601


def test_a_thousand_ranks_are_sixteen_replicas_of_equal_ranks() -> None:
    settings = settings_for(devices=1024, window=32768)
    parallel = layout_of(4, 16, 16, data_parallel_size=16)
    requests = [TracedRequest(5000, 20, (), 0.0)] * 32
    found = answer_of(requests, settings=settings, parallel=parallel)
    assert found["finished"] == 32
    assert found["tok_s_per_device"] == found["tok_s"] / 1024
    assert len(found["ranks"]["rows"]) == 1024
    # Two alike for each replica, whichever came first.
    assert len(set(found["ranks"]["rows"])) == 1
    assert sum(found["ranks"]["kv_tokens"]) % 4 == 0


def test_decodes_beside_a_long_prompt_are_starved() -> None:
    settings = settings_for(devices=1, window=65536, chunk=2048)
    calm = [TracedRequest(100, 400, (), 0.0)]
    found = answer_of(calm, settings=settings)["decode_starvation"]
    assert found["share_of_steps"] == 0.0
    both = [*calm, TracedRequest(60_000, 2, (), 0.5)]
    beside = answer_of(both, settings=settings)["decode_starvation"]
    assert beside["share_of_steps"] == pytest.approx(30 / 400, abs=0.01)
    assert beside["longest_gap_s"] > 5 * found["longest_gap_s"]


def test_targets_are_kept_by_the_first_token_and_the_mean_gap() -> None:
    times = Times(arrival=1.0, prompt_len=5, first=2.0, last=4.0, num_tokens=3)
    assert Targets(ttft=1.0, tpot=1.0).keeps(times)
    assert not Targets(ttft=0.9).keeps(times)
    assert not Targets(tpot=0.9).keeps(times)
    assert Targets().keeps(times)
    assert Targets(tpot=0.1).keeps(Times(arrival=0.0, prompt_len=5))
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="is a number of seconds above 0"):
            Targets(tpot=wrong)


def test_a_layout_that_does_not_fit_is_refused() -> None:
    settings = settings_for("llama-3.1-405b", devices=1)
    job = Job(settings=settings, parallel=layout_of(1), requests=[], targets=Targets())
    with pytest.raises(ConfigError, match="a rank needs"):
        run_job(job)
    empty = Job(
        settings=settings_for(devices=1), parallel=layout_of(1), requests=[], targets=Targets()
    )
    found = measure(engine_for(empty.settings), empty)
    assert (found["requests"], found["ttft"], found["tok_s"]) == (0, None, 0.0)
