"""Steps that are launched again give the bits of steps that Python computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from heddle.config.sampling import SamplingParams
from heddle.engine.llm import LLM
from heddle.kernels.recording.recordings import Recordings
from tests.support.tiny import build_tiny

PROMPTS = [[3 + i % 90 for i in range(n)] for n in (70, 3, 21, 40, 9)]


def answers(path: Path, **settings: Any) -> list[list[float]]:
    """Log-probabilities of answers of several lengths, to the last bit."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, logprobs=2)
        for n in (14, 9, 5, 12, 7)
    ]
    options: dict[str, Any] = {"max_num_batched_tokens": 32, "block_size": 4, "max_num_seqs": 3}
    with LLM(str(path), kernels="numba", **(options | settings)) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [
        [entry.logprob for place in output.outputs[0].logprobs or () for entry in place.values()]
        for output in outputs
    ]


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many passes were repeated, over all ranks."""
    made: list[Recordings] = []
    create = Recordings.__init__

    def noted(self: Recordings, num_threads: int) -> None:
        create(self, num_threads)
        made.append(self)

    monkeypatch.setattr(Recordings, "__init__", noted)
    return lambda: sum(recordings.num_repeated for recordings in made)


LAYOUTS = {
    "one rank": {},
    "PCP 2 DCP 2": {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2},
    "TP 2": {"tensor_parallel_size": 2},
    "TP 2 DCP 2, all-to-all": {
        "tensor_parallel_size": 2,
        "decode_context_parallel_size": 2,
        "dcp_comm_backend": "a2a",
    },
    "two stages": {"pipeline_parallel_size": 2},
}


@pytest.mark.parametrize("model", ["llama-6-2", "qwen3", "gemma2", "phi3-window"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_are_those_of_an_eager_engine(
    tmp_path: Path, repeats: Callable[[], int], model: str, layout: str
) -> None:
    path = build_tiny(tmp_path, model)
    settings = {"executor": "threads", **LAYOUTS[layout]}
    expected = answers(path, enforce_eager=True, **settings)
    assert repeats() == 0
    assert answers(path, **settings) == expected
    assert repeats() > 8


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8", "fp8_e4m3"])
def test_with_a_narrow_cache(
    tmp_path: Path, repeats: Callable[[], int], kv_cache_dtype: str
) -> None:
    path = build_tiny(tmp_path, "llama-9-3")
    expected = answers(path, enforce_eager=True, kv_cache_dtype=kv_cache_dtype)
    assert answers(path, kv_cache_dtype=kv_cache_dtype) == expected
    assert repeats() > 8


def test_when_blocks_run_out_and_threads_share(tmp_path: Path, repeats: Callable[[], int]) -> None:
    path = build_tiny(tmp_path, "llama-6-2")
    settings = {"num_gpu_blocks_override": 24, "num_threads": 2}
    assert answers(path, **settings) == answers(path, enforce_eager=True, **settings)
    assert repeats() > 8


def test_with_drafts_and_over_rank_processes(tmp_path: Path) -> None:
    """Several rows of a sequence; and collectives over shared memory."""
    path = build_tiny(tmp_path, "llama-6-2")
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    layout = {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2}
    for settings in (drafts, {"executor": "processes", **layout}):
        assert answers(path, **settings) == answers(path, enforce_eager=True, **settings)
