"""Tiny checkpoints and their golden runs, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.flagship import (
    Case,
    GoldenAnswer,
    Prompt,
    Report,
    golden_run,
    near_tie_share,
    rounding_error,
    row_error,
    run_case,
    tolerance_of,
)
from tests.support.tiny import build_tiny

RECURRENT = ("qwen3-next", "bamba", "minimax")


class GoldenModels:
    """Checkpoint folder and golden answers by (name, dtype).

    Weights whose golden run is full of near ties prove nothing, so others are drawn.

    Logits of another layout may differ by a rounding of the largest logit. Recurrent layers carry
    rounding on from token to token; there it is twice what one rank itself differs from float64.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths: dict[str, Path] = {}
        self._tolerances: dict[str, tuple[float, float]] = {}
        """Of logits and of cached rows."""
        self._answers: dict[tuple[str, str, int, str], dict[Prompt, GoldenAnswer]] = {}

    def path(self, name: str) -> Path:
        if name not in self._paths:
            for seed in range(20):
                path = build_tiny(self._folder, name, seed)
                answers = golden_run(path)
                tolerance, row_tolerance = tolerance_of(answers), 1e-5
                if name in RECURRENT:
                    exact = self._answers[name, "float64", 0, "auto"] = golden_run(path, "float64")
                    tolerance = max(tolerance, 2 * rounding_error(answers, exact))
                    row_tolerance = max(row_tolerance, 2 * row_error(answers, exact))
                if near_tie_share(answers, tolerance) <= 0.01:
                    break
            else:
                pytest.fail(f"{name}: twenty draws of weights, all full of near ties")
            self._paths[name] = path
            self._answers[name, "float32", 0, "auto"] = answers
            self._tolerances[name] = tolerance, row_tolerance
        return self._paths[name]

    def run(self, name: str, case: Case) -> Report:
        """One model in one case against golden."""
        golden = self.golden(name, case.dtype, case.num_first)
        if case.dtype == "float64":
            return run_case(self.path(name), golden, case, tolerance_of(golden, case.dtype))
        tolerance, row_tolerance = self._tolerances[name]
        tolerance = max(tolerance, tolerance_of(golden, case.dtype))
        return run_case(self.path(name), golden, case, tolerance, row_tolerance)

    def check(self, kind: str, name: str, case: Case) -> None:
        """A default case: equal to golden, and it did what it was meant to do."""
        report = self.run(name, case)
        assert report.num_tokens == 77
        assert report.num_near_ties <= 0.02 * report.num_tokens
        assert report.num_audited_rows > 200
        if case.has_drafts:
            assert report.num_drafts > 0
        if case.has_prefix and not case.is_preempted and kind in ("full GQA", "MLA"):
            # 30, 13, 36 and 5 tokens of the second wave lie in the cache, to the token.
            assert report.num_cached_tokens >= 84 or case.replicas > 1

    def rounding(self, name: str) -> float:
        """How far float32 logits of a recurrent model may lie apart; 0 for others."""
        self.path(name)
        return self._tolerances[name][0] if name in RECURRENT else 0.0

    def golden(
        self, name: str, dtype: str = "float32", num_first: int = 0, kv_dtype: str = "auto"
    ) -> dict[Prompt, GoldenAnswer]:
        path, key = self.path(name), (name, dtype, num_first, kv_dtype)
        if key not in self._answers:
            self._answers[key] = golden_run(path, dtype, num_first, kv_dtype)
        return self._answers[key]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> GoldenModels:
    return GoldenModels(tmp_path_factory.mktemp("tiny"))
