from __future__ import annotations

import re

import pytest

from heddle.config import EngineConfig, SchedulerConfig
from heddle.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policy": "lifo"}, "scheduling_policy='lifo' is not legal; legal here: fcfs, priority"),
        ({"target_itl_ms": 0}, "target_itl=0 is not legal; it is a number of milliseconds above 0"),
        ({"target_itl_ms": True}, "target_itl=True is not legal"),
        ({"target_itl_ms": float("nan")}, "target_itl=nan is not legal"),
        ({"target_itl_ms": float("inf")}, "at most 600000, or None (nearest: None)"),
        ({"max_num_queued_reqs": -1}, "max_num_queued_reqs=-1 is not legal; it is at least 0"),
        ({"max_num_queued_reqs": None}, "max_num_queued_reqs=None is not legal; it is a whole"),
        ({"max_num_queued_tokens": 1.5}, "max_num_queued_tokens=1.5 is not legal; it is a whole"),
        ({"max_num_queued_tokens": -2}, "max_num_queued_tokens=-2 is not legal; it is at least 0"),
    ],
)
def test_what_is_not_legal_is_refused_with_the_rule(fields, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        SchedulerConfig(**fields)


def test_what_a_message_offers_is_legal():
    for fields in (
        {"policy": "fcfs"},
        {"policy": "priority"},
        {"target_itl_ms": None},
        {"target_itl_ms": 600_000},
        {"target_itl_ms": 0.5},
        {"max_num_queued_reqs": 0},
        {"max_num_queued_tokens": 0},
        {"max_num_queued_tokens": None},
    ):
        SchedulerConfig(**fields)


def test_measured_budgets_and_equal_bits_exclude_each_other():
    paced = SchedulerConfig(target_itl_ms=50)
    with pytest.raises(ConfigError, match=r"target_itl=50 is not legal with deterministic=True"):
        EngineConfig(model="m", deterministic=True, scheduler=paced)
    assert EngineConfig(model="m", deterministic=False, scheduler=paced).scheduler is paced
    assert EngineConfig(model="m", deterministic=True).scheduler.target_itl_ms is None
