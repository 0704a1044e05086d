"""Messages that the page on troubleshooting quotes are those that the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = sorted(set(re.findall(r"(?:\*\*|\()`([^`]+)`(?:\*\*|\))", PAGE)) - {"[DONE]"})
SOURCES = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "heddle").rglob("*.py"))
FLAGS = sorted(set(re.findall(r"`(--[a-z-]+)", PAGE)))


def test_the_page_quotes_messages() -> None:
    assert len(QUOTED) > 20


@pytest.mark.parametrize("words", QUOTED)
def test_a_quoted_message_is_in_the_code(words: str) -> None:
    assert words in SOURCES


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_that_is_advised_exists(flag: str) -> None:
    flags = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert f"`{flag}`" in flags or flag == "--nproc-per-node"


def test_paths_and_flags_of_the_guide_exist() -> None:
    guide = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    flags = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(--[a-z-]+)", guide))
    assert len(named) > 10
    assert {flag for flag in named if f"`{flag}`" not in flags} == set()
    codes = set(re.findall(r"^\| \d{3}.*?\| (`[^|]+`)", guide, re.MULTILINE))
    from heddle.server.errors import KINDS

    told = {code for cell in codes for code in re.findall(r"`(\w+)`", cell)}
    assert told == set(KINDS) - {"conflict"}
