"""Answers of a given form on real ranks: the same on every layout, and with recorded steps."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from heddle.config.sampling import SamplingParams
from heddle.engine.llm import LLM
from heddle.engine.outputs import CompletionOutput
from heddle.kernels.recording.recordings import Recordings
from tests.support.byte_tokenizer import printable, save_folder
from tests.support.tiny import build_tiny

RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
CODE = "[A-F]{2}(-[0-9]{3}){4}"
PROMPTS = [[3 + i % 90 for i in range(n)] for n in (41, 3, 21, 17)]


def form(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **fields})


PARAMS = [
    form(60, structured_outputs={"json": RECORD}),
    form(30, ignore_eos=True),
    form(40, structured_outputs={"regex": CODE}),
    form(40, structured_outputs={"regex": CODE}, temperature=1.0, seed=7, n=2),
]
LAYOUTS: dict[str, dict[str, Any]] = {
    "PCP 2 DCP 2": {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2},
    "TP 2 DCP 2": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = build_tiny(tmp_path_factory.mktemp("model"), "llama-6-2")
    return save_folder(path, printable(), eos_token="<|end|>")


def answers(path: Path, **settings: Any) -> list[list[CompletionOutput]]:
    options: dict[str, Any] = {"block_size": 4, "max_num_seqs": 5, "max_num_batched_tokens": 32}
    with LLM(str(path), **(options | settings)) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [list(output.outputs) for output in outputs]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[CompletionOutput]]:
    """Of one rank, without recordings."""
    return answers(model, enforce_eager=True)


def test_answers_have_their_form(expected: list[list[CompletionOutput]]) -> None:
    (record,), (plain,), (code,), drawn = expected
    assert set(json.loads(record.text)) == {"name", "size"}
    assert len(plain.token_ids) == 30
    for found in (code, *drawn):
        assert re.fullmatch(CODE, found.text)
        assert found.finish_reason == "stop"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_answers(
    model: Path, expected: list[list[CompletionOutput]], layout: str
) -> None:
    assert answers(model, executor="threads", **LAYOUTS[layout]) == expected


@pytest.mark.parametrize("layout", ["one rank", "PCP 2 DCP 2"])
def test_recorded_steps_keep_no_mask(
    model: Path,
    expected: list[list[CompletionOutput]],
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps that look alike are launched again, beside plain requests, and each has its mask."""
    made: list[Recordings] = []
    create: Callable[..., None] = Recordings.__init__

    def noted(self: Recordings, num_threads: int) -> None:
        create(self, num_threads)
        made.append(self)

    monkeypatch.setattr(Recordings, "__init__", noted)
    settings = {"executor": "threads", **LAYOUTS.get(layout, {})}
    assert answers(model, kernels="numba", **settings) == expected
    assert sum(recordings.num_repeated for recordings in made) > 8
