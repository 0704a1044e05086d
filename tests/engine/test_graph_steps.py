"""Decode steps as padded graphs give the bits of steps that Python computes.

Graphs are noted on the CPU (`tests.support.noted_graphs`), and everything that a pass has left is
spoiled before the next one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from heddle.runner import worker
from tests.engine.test_repeated_steps import LAYOUTS, answers
from tests.support.noted_graphs import SpoiledGraphs
from tests.support.tiny import build_tiny


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[SpoiledGraphs]:
    """Of all ranks of the engines that are made from here on."""
    made: list[SpoiledGraphs] = []

    def create(*_: Any) -> SpoiledGraphs:
        made.append(SpoiledGraphs(row_counts=(1, 4)))
        return made[-1]

    monkeypatch.setattr(worker, "_create_recordings", create)
    return made


def eager(path: Path, **settings: Any) -> list[list[float]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "_create_recordings", lambda *_: None)
        return answers(path, **settings)


@pytest.mark.parametrize("model", ["llama-6-2", "gemma2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_are_those_of_an_eager_engine(
    tmp_path: Path, graphs: list[SpoiledGraphs], model: str, layout: str
) -> None:
    """Three sequences, and later two, are four rows."""
    path = build_tiny(tmp_path, model)
    settings = {"executor": "threads", **LAYOUTS[layout]}
    expected = eager(path, **settings)
    assert answers(path, **settings) == expected
    assert all(found.num_repeated > 4 for found in graphs)
    for found in graphs:
        assert found.num_captured < found.eager["warm-up"] < 8
        (why,) = found.eager.keys() - {"warm-up"}
        assert why in ("distributed rows", "more than 4 rows")  # prompts are cut, or copied whole


def test_pads_change_no_bit_and_none_is_needed_where_rows_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs of 3 rows hold the first steps whole; of 8 rows, five of them are pads."""
    path, found = build_tiny(tmp_path, "phi3-window"), []
    for row_counts in ((1, 2, 3), (8,)):
        kept = SpoiledGraphs(row_counts=row_counts)
        monkeypatch.setattr(worker, "_create_recordings", lambda *_, kept=kept: kept)
        found.append(answers(path))
        assert kept.num_repeated > 4
    assert found[0] == found[1]


def test_with_narrow_caches_and_when_blocks_run_out(
    tmp_path: Path, graphs: list[SpoiledGraphs]
) -> None:
    path = build_tiny(tmp_path, "llama-6-2")
    for settings in ({"kv_cache_dtype": "int8"}, {"num_gpu_blocks_override": 24}):
        assert answers(path, **settings) == eager(path, **settings)
    assert all(found.num_repeated > 4 for found in graphs)


def test_steps_with_drafts_have_graphs_too(tmp_path: Path, graphs: list[SpoiledGraphs]) -> None:
    """A sequence has several rows then, each with a table of its own."""
    path = build_tiny(tmp_path, "llama-6-2")
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    expected = eager(path, **drafts)
    for one, other in zip(answers(path, **drafts), expected, strict=True):
        assert one == pytest.approx(other, abs=1e-5)  # other kernels meet many rows of a sequence
    assert graphs[0].num_repeated > 0
