"""The engine beside an engine is one rank with a pool for one sequence, and says what it costs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from heddle import LLM
from heddle.engine.args import engine_config
from heddle.engine.machine import resolve_here
from heddle.engine.shadow.create import MAX_TOKENS, shadow_config
from tests.support.tiny import build_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("create"), "llama-8-2")


@pytest.mark.parametrize(
    ("executor", "beside"), [("processes", "processes"), ("threads", "inline")]
)
def test_it_is_one_rank_with_room_for_one_sequence(
    folder: Path, executor: str, beside: str
) -> None:
    config = engine_config(
        str(folder),
        executor=executor,
        prefill_context_parallel_size=2,
        decode_context_parallel_size=2,
        verify_every=7,
        block_size=4,
        max_model_len=201,
        num_gpu_blocks_override=900,
        speculative_config={"num_speculative_tokens": 2},
    )
    found = shadow_config(config, resolve_here(config, None))
    assert (found.parallel.world_size, found.executor) == (1, beside)
    assert (found.verify_every, found.max_restarts, found.speculative) == (0, 0, None)
    assert not found.cache.enable_prefix_caching
    assert found.cache.num_blocks_override == -(-min(201, MAX_TOKENS) // 4) + 1 == 52
    assert resolve_here(found, None).scheduler.max_model_len == 201


def test_what_it_costs_is_said_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="heddle.verify"):
        LLM(
            str(folder),
            executor="threads",
            tensor_parallel_size=2,
            verify_every=9,
            num_threads=1,
            block_size=4,
        ).close()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "heddle.verify"]
    assert line.startswith("every 9 steps one row is computed once more by one rank of its own: ")
    assert " MiB of weights, " in line
    assert line.endswith("sequences up to 512 tokens")
