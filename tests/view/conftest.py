from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from heddle.config.sampling import SamplingParams
from heddle.engine.args import engine_config
from heddle.engine.llm import LLM
from tests.support.served import toy_folder


@pytest.fixture(scope="session")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an engine of two ranks, PCP 2 DCP 2, that answered two prompts."""
    from tests.support.tiny import build_tiny  # imports transformers: seconds

    folder = tmp_path_factory.mktemp("traced")
    config = engine_config(
        model=str(build_tiny(folder, "llama-6-2")),
        executor="threads",
        trace_file=str(folder / "trace.json"),
        prefill_context_parallel_size=2,
        decode_context_parallel_size=2,
    )
    prompts = [[3 + i % 90 for i in range(n)] for n in (40, 7)]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with LLM.from_config(config) as llm:
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    return folder / "trace.json"


@pytest.fixture(scope="session")
def traced(trace_file: Path) -> list[dict[str, Any]]:
    """Its events."""
    events: list[dict[str, Any]] = json.loads(trace_file.read_text())
    return events


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config without weights: one layer, 4 query heads over 2 of KV, 256 tokens."""
    return toy_folder(tmp_path_factory.mktemp("toy"))
