"""Tiny checkpoints and their golden runs, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.flagship import GoldenAnswer, Prompt, golden_run, near_tie_share
from tests.support.tiny import build_tiny


class GoldenModels:
    """Checkpoint folder and golden answers by (name, dtype).

    Weights whose golden run is full of near ties prove nothing, so others are drawn.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths: dict[str, Path] = {}
        self._answers: dict[tuple[str, str], dict[Prompt, GoldenAnswer]] = {}

    def path(self, name: str) -> Path:
        if name not in self._paths:
            for seed in range(20):
                path = build_tiny(self._folder, name, seed)
                answers = golden_run(path)
                if near_tie_share(answers) <= 0.01:
                    break
            self._paths[name] = path
            self._answers[name, "float32"] = answers
        return self._paths[name]

    def golden(self, name: str, dtype: str = "float32") -> dict[Prompt, GoldenAnswer]:
        path = self.path(name)
        if (name, dtype) not in self._answers:
            self._answers[name, dtype] = golden_run(path, dtype)
        return self._answers[name, dtype]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> GoldenModels:
    return GoldenModels(tmp_path_factory.mktemp("tiny"))
