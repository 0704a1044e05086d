"""Write the pages that follow from the code: `docs/flags.md`, and the table of `docs/metrics.md`.

    python tools/reference_pages.py            writes both
    python tools/reference_pages.py --check    exit code 1 if one of them is not what it would write

Tests compare the pages with what these functions give, so a flag or a metric that changes is seen.
"""

from __future__ import annotations

import argparse
import importlib
import io
import re
import sys
from pathlib import Path

from heddle.cli.main import COMMANDS, NESTED
from heddle.cli.output import Output
from heddle.cli.parser import CommandParser
from heddle.server.metric_table import render_table

DOCS = Path(__file__).parents[1] / "docs"
FLAGS_PAGE = DOCS / "flags.md"
METRICS_PAGE = DOCS / "metrics.md"
TABLE_MARKS = ("<!-- table of names: begin -->\n", "<!-- table of names: end -->\n")
SHARED_SECTIONS = ("layout", "engine")
"""Flags that several commands have alike; shown once."""
COMMON = frozenset(("--help", "--json", "--debug"))
INTRODUCTION = """# Flags

This page is made by `tools/reference_pages.py` from the parsers of the commands; do not edit it.

A value is taken from the flag, else from the variable `HEDDLE_<FLAG>` (`HEDDLE_MAX_MODEL_LEN=8k`),
else it is the default. `_` and `-` are equal in names, `--flag=value` works, and `--no-flag`
switches a boolean off. Sizes take `k` (1000) and `K` (1024), and so on. `heddle COMMAND --help`
says the same, `--help=--flag` about one flag alone. Every command has `--help`, `--json` (one JSON
document on stdout) and `--debug` (a traceback with an error).
"""


def render_flags_page() -> str:
    """All commands, and all their flags."""
    parsers = {name: _parser(name) for name in (*COMMANDS, *NESTED)}
    parts = [INTRODUCTION]
    for name, parser in sorted(parsers.items()):
        own = [s for s in parser.sections if s not in SHARED_SECTIONS and _actions(parser, s)]
        shared = [section for section in SHARED_SECTIONS if section in parser.sections]
        parts.append(f"## heddle {name}\n\n{_sentence(parser.description)}\n")
        positionals = [a for a in parser._actions if not a.option_strings]
        parts += [f"- `{a.metavar or a.dest}`: {_text(a)}\n" for a in positionals]
        parts += [_table(f"### {name}: {section}", parser, section) for section in own]
        if shared:
            links = ", ".join(f"[{section}](#{section}-flags)" for section in shared)
            parts.append(f"Also the flags of {links}.\n")
    for section in SHARED_SECTIONS:
        owner = next(p for p in parsers.values() if section in p.sections)
        parts.append(_table(f"## {section.capitalize()} flags", owner, section))
    return "\n".join(parts)


def render_metrics_page(page: str) -> str:
    """The page of metrics with a new table.

    Args:
        page: as it is; the marks stand in it.
    """
    begin, end = TABLE_MARKS
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    assert after or page.endswith(end), "the page has lost its marks"
    return before + begin + render_table() + end + after


def _parser(name: str) -> CommandParser:
    output = Output(stream=io.StringIO(), log=io.StringIO())
    module = importlib.import_module("heddle.cli." + re.sub("[- ]", "_", name))
    parser: CommandParser = module.create_parser({}, output)
    return parser


def _table(title: str, parser: CommandParser, section: str) -> str:
    lines = [f"{title}\n", "| flag | default | meaning |", "| --- | --- | --- |"]
    for action in _actions(parser, section):
        names = [n for n in action.option_strings if not n.startswith("--no-")]
        flag = ", ".join(f"`{name}`" for name in names)
        legal = ", ".join(map(str, action.choices)) if action.choices else ""
        meaning = _text(action) + (f" One of: {legal}." if legal else "")
        lines.append(f"| {flag} | {_default(action)} | {meaning} |")
    return "\n".join(lines) + "\n"


def _actions(parser: CommandParser, section: str) -> list[argparse.Action]:
    """Flags of a section, those that every command has left out."""
    found = parser.sections[section]._group_actions
    return [action for action in found if not COMMON.intersection(action.option_strings)]


def _text(action: argparse.Action) -> str:
    return _sentence(action.help).replace("|", "\\|").replace("%%", "%")


def _sentence(text: str | None) -> str:
    text = re.sub(r"\s+", " ", text or "").strip()
    return text if not text or text.endswith((".", ":", "`")) else f"{text}."


def _default(action: argparse.Action) -> str:
    value = action.default
    if value in (None, "", (), []) or value == argparse.SUPPRESS:
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`"


def main() -> int:
    """Write, or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args().check
    page = METRICS_PAGE.read_text(encoding="utf-8")
    wanted = {FLAGS_PAGE: render_flags_page(), METRICS_PAGE: render_metrics_page(page)}
    stale = [p for p, text in wanted.items() if not p.exists() or p.read_text("utf-8") != text]
    for path in stale:
        print(f"{path.name} {'is stale' if check else 'written'}")
        if not check:
            path.write_text(wanted[path], encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
