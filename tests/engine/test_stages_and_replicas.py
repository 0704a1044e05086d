"""Real ranks: a tiny model in stages and replicas says what it says on one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from heddle.config import SamplingParams
from heddle.engine.llm import LLM
from tests.support.processes import LONG_SECONDS
from tests.support.tiny import build_tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SEEDED = SamplingParams(seed=3, max_tokens=6, ignore_eos=True, logprobs=0)
CHUNK = 8
PROMPTS = [[(7 * i + k * k) % 50 + 3 for k in range(length)] for i, length in enumerate((19, 1, 7))]
DP2 = {"data_parallel_size": 2}
PP2 = {"pipeline_parallel_size": 2}
CASES = {
    "llama pp2": ("llama-6-2", PP2),
    "llama dp2": ("llama-6-2", DP2),
    "llama dp2 pp2": ("llama-6-2", DP2 | PP2),
    "llama dp2 tp2": ("llama-6-2", DP2 | {"tensor_parallel_size": 2}),
    "llama pp2 pcp2 dcp2": (
        "llama-6-2",
        PP2 | {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2},
    ),
    "windows pp3": ("gemma3", {"pipeline_parallel_size": 3}),
    "experts dp2": ("qwen3-moe", DP2),
    "shared experts dp2": ("qwen3-moe", DP2 | {"enable_expert_parallel": True}),
    "shared experts dp2 pp2": ("qwen3-moe", DP2 | PP2 | {"enable_expert_parallel": True}),
}


class Models:
    """Folders and the tokens of one rank, made once each."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._folders: dict[str, Path] = {}
        self._expected: dict[str, list[tuple[int, ...]]] = {}

    def folder(self, name: str) -> Path:
        if name not in self._folders:
            self._folders[name] = build_tiny(self._base / name, name)
        return self._folders[name]

    def expected(self, name: str) -> list[tuple[int, ...]]:
        if name not in self._expected:
            self._expected[name] = answers_of(self.folder(name), "inline", {})
        return self._expected[name]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("stages"))


def answers_of(folder: Path, executor: str, layout: dict[str, int]) -> list[tuple[int, ...]]:
    """Tokens of all prompts, greedy and seeded; small steps, so that prompts come in pieces."""
    with LLM(
        str(folder),
        executor=executor,
        block_size=4,
        num_blocks_override=60,
        max_num_batched_tokens=CHUNK,
        num_threads=1,
        step_timeout_seconds=LONG_SECONDS,
        **layout,
    ) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS * 2]
        params = [GREEDY] * len(PROMPTS) + [SEEDED] * len(PROMPTS)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm.driver.audit()
        return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("case", CASES)
def test_stages_and_replicas_in_threads_change_no_token(models: Models, case: str) -> None:
    name, layout = CASES[case]
    assert answers_of(models.folder(name), "threads", layout) == models.expected(name)


@pytest.mark.dist
def test_stages_and_replicas_in_processes_change_no_token(models: Models) -> None:
    name, layout = CASES["llama dp2 pp2"]
    assert answers_of(models.folder(name), "processes", layout) == models.expected(name)
