from __future__ import annotations

import sys

import pytest

from heddle.bench.speed import describe_engine, measure_latency, measure_throughput
from heddle.engine.args import engine_config
from heddle.engine.machine import resolve_here
from heddle.errors import ConfigError

ECHO = """
from heddle.bench.lines import Clock, serve

class Echo:
    version, dtype = "1", "as stored"
    def run(self, prompts, num_tokens):
        clock = Clock(); clock.first()
        return clock.answer([prompt[:num_tokens] for prompt in prompts])

serve("echo", lambda arguments: Echo())
"""


@pytest.fixture
def peers_dir(tmp_path):
    (tmp_path / "echo" / "bin").mkdir(parents=True)
    python = tmp_path / "echo" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o700)
    (tmp_path / "echo" / "peer.py").write_text(ECHO)
    return tmp_path


def test_streams_run_beside_a_peer(tiny_folder, peers_dir):
    said = []
    found = measure_throughput(
        engine_config(str(tiny_folder), kernels="torch", attention_backend="torch"),
        prompt_len=6,
        streams=[1, 3],
        num_tokens=2,
        rounds=1,
        peers=["echo"],
        peers_dir=peers_dir,
        report=said.append,
    )
    assert [peer["name"] for peer in found["peers"]] == ["echo"]
    assert [case["num_streams"] for case in found["prompts"]] == [1, 3]
    for case in found["prompts"]:
        assert [row["name"] for row in case["engines"]] == ["heddle", "echo"]
        assert case["engines"][1]["ratio_decode"] > 0
    assert said == ["loading echo", "1 x 6 tokens", "3 x 6 tokens"]


def test_a_prompt_that_does_not_fit_is_refused_before_it_runs(tiny_folder, tmp_path):
    config = engine_config(
        str(tiny_folder), kernels="torch", attention_backend="torch", max_model_len=16
    )
    with pytest.raises(ConfigError, match=r"18 tokens; the window is 16 tokens \(nearest: 16\)"):
        measure_latency(
            config, prompt_lens=[4, 14], num_tokens=4, rounds=1, peers_dir=tmp_path, report=print
        )


def test_the_engine_is_described_by_what_a_time_depends_on(tiny_folder):
    plan = resolve_here(engine_config(str(tiny_folder), tensor_parallel_size=2, num_threads=1))
    found = describe_engine(plan)
    assert (found["tp"], found["num_threads"], found["dtype"]) == (2, 1, "float32")
    assert found["executor"] == plan.executor
