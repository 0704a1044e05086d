from __future__ import annotations

import pytest

from heddle.bench.step import WatchedExecutor, measure_step
from heddle.engine.args import engine_config
from heddle.errors import ConfigError
from heddle.step.batch import GlobalBatch, RankReply


class Slow:
    """Ranks that take what they say."""

    world_size = 2

    def __init__(self):
        self.log = []

    def submit(self, batches):
        self.log.append("submit")

    def first_done(self):
        return 0

    def collect(self, replica):
        self.log.append("collect")
        return tuple(
            RankReply(epoch=0, step=0, digest=1, coverage=(), seconds=seconds)
            for seconds in (0.25, 0.5)
        )


def test_an_executor_is_watched_and_otherwise_the_same():
    inner = Slow()
    watched = WatchedExecutor(inner)
    batch = GlobalBatch(epoch=0, step=0, requests=())
    replies = watched.execute(batch, 1)
    assert len(replies) == watched.world_size == 2
    assert watched.first_done() == 0
    assert inner.log == ["submit", "collect"]
    assert watched.batches == [batch]
    assert watched.rank_seconds == [0.5]  # the slowest rank
    assert watched.waited_seconds > 0


def test_the_parts_of_a_step_add_up(tiny_folder):
    config = engine_config(str(tiny_folder), kernels="torch", attention_backend="torch")
    found = measure_step(config, num_streams=3, prompt_len=9, num_steps=4)
    assert found["num_steps"] == 4
    parts = {(part["where"], part["part"]): part for part in found["parts"]}
    assert list(parts) == [
        ("driver", "schedule"),
        ("driver", "plan"),
        ("driver", "messages"),
        ("rank", "plan"),
        ("rank", "localize"),
        ("rank", "sample"),
        ("rank", "model"),
    ]
    assert sum(part["share"] for part in parts.values()) == pytest.approx(1.0)
    assert all(part["seconds"] >= 0 for part in parts.values())
    outside = sum(part["seconds"] for key, part in parts.items() if key[1] not in WORK)
    assert found["driver_share"] == pytest.approx(outside / found["step_seconds"])


WORK = ("sample", "model")


def test_overlapping_steps_are_refused(tiny_folder):
    config = engine_config(str(tiny_folder), pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match="steps of stages and replicas overlap"):
        measure_step(config, num_streams=1, prompt_len=4, num_steps=2)
