from __future__ import annotations

import json

import numba
from numba.core import event

from heddle import LLM, SamplingParams
from heddle.cli import warmup
from heddle.cli.main import main
from heddle.cli.warmup import describe
from heddle.kernels.warmup import ATTENTION, LAYERS, REPEATING
from tests.support.fake_worker import fake_config


def test_operations_of_the_layout_are_there_afterwards(tiny_folder, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(
        warmup, "compile_here", lambda names, say: asked.append(names) or ["rotate"]
    )
    assert main(["warmup", str(tiny_folder), "--attention-backend", "numba", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert asked == [(*LAYERS, REPEATING, *ATTENTION)]
    assert (document["kernels"], document["backend"]) == ("numba", "numba")
    states = {row["name"]: row["state"] for row in document["operations"]}
    assert states == dict.fromkeys(asked[0], "was there") | {"rotate": "compiled now"}


def test_torch_has_nothing_to_compile(tiny_folder, capsys):
    words = ["warmup", str(tiny_folder), "--kernels", "torch", "--attention-backend", "torch"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert "compiling" not in captured.err
    assert captured.out.splitlines()[0] == "compiled kernels"
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["operations"] == []


def test_seconds_are_those_of_the_compiler():
    document = describe(fake_config(), ["a"], [], 1.5)
    assert document["seconds"] == 1.5


def test_nothing_compiles_after_the_start(tiny_folder):
    """Greedy and drawn, short and long, one and several, and what sampling needs."""
    drawn = SamplingParams(temperature=1.0, top_p=0.9, min_p=0.01, max_tokens=4)
    prompts = ["abc", "the loom was " * 9, "x"]
    with LLM(str(tiny_folder), attention_backend="numba", kv_cache_memory_bytes=1 << 20) as llm:
        assert (llm.plan.kernels, llm.plan.executor) == ("numba", "inline")
        passes = event.RecordingListener()
        with event.install_listener("numba:run_pass", passes):
            for params in (SamplingParams(temperature=0.0, max_tokens=4), drawn):
                llm.generate(prompts, params, use_tqdm=False)
                llm.generate(prompts[0], params, use_tqdm=False)
            assert passes.buffer == []
            assert numba.njit(lambda x: x + 1)(1) == 2
            assert passes.buffer != []  # a compilation would have been seen
