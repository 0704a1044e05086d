"""Pages that follow from the code are what the code says now."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from heddle.cli.main import COMMANDS, NESTED

TOOL = Path(__file__).parents[1] / "tools" / "reference_pages.py"


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    """The tool that writes them."""
    spec = importlib.util.spec_from_file_location("reference_pages", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_flags_is_what_the_parsers_say(pages: ModuleType) -> None:
    # Written anew by tools/reference_pages.py.
    assert pages.FLAGS_PAGE.read_text(encoding="utf-8") == pages.render_flags_page()


def test_the_table_of_metrics_is_the_one_of_the_code(pages: ModuleType) -> None:
    page = pages.METRICS_PAGE.read_text(encoding="utf-8")
    assert page == pages.render_metrics_page(page)
    assert pages.render_metrics_page(page.replace("| counter |", "| gauge |", 1)) == page


def test_every_command_and_flag_is_on_the_page(pages: ModuleType) -> None:
    text = pages.render_flags_page()
    for name in (*COMMANDS, *NESTED):
        assert f"\n## heddle {name}\n" in text
    for flag in ("--metrics-compat", "--prefill-context-parallel-size", "--max-restarts", "-pcp"):
        assert text.count(f"`{flag}`") == 1
    assert "| `--port` | `8000` |" in text


def test_checking_writes_nothing(
    pages: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags, metrics = tmp_path / "flags.md", tmp_path / "metrics.md"
    flags.write_text("old", encoding="utf-8")
    metrics.write_text("".join(pages.TABLE_MARKS), encoding="utf-8")
    monkeypatch.setattr(pages, "FLAGS_PAGE", flags)
    monkeypatch.setattr(pages, "METRICS_PAGE", metrics)
    monkeypatch.setattr(sys, "argv", ["reference_pages.py", "--check"])
    assert pages.main() == 1
    assert flags.read_text(encoding="utf-8") == "old"
    monkeypatch.setattr(sys, "argv", ["reference_pages.py"])
    assert pages.main() == 0
    monkeypatch.setattr(sys, "argv", ["reference_pages.py", "--check"])
    assert pages.main() == 0
    said = capsys.readouterr().out
    assert said.count("is stale") == 2
    assert said.count("written") == 2
