"""What all benchmarks share: flags, targets, the table for people, and the last line for machines.

    report = Report("attention", arguments)
    report.table("decode", columns, rows)
    report.target("W1", "9/3x64, 4096 tokens: share of read bandwidth", value, at_least=0.8)
    return report.finish(metrics)

Every figure is a ratio of one interleaved run. A figure that misses its target is printed as
missed; it is no failure of the run. The last line is one JSON object: schema, commit, hardware,
command, metrics, targets. With `--save` both forms are kept in `results/`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

from heddle.cli.output import Cell, Table, aligned
from heddle.engine.measured_costs import processor_name

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]
NUM_CORES = len(os.sched_getaffinity(0))


def parser(description: str | None) -> argparse.ArgumentParser:
    """The flags of every benchmark."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--quick", action="store_true", help="small sizes: does it run at all")
    made.add_argument("--rounds", type=int, help="times that each contestant runs")
    made.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    return made


def say(line: str) -> None:
    """Progress, beside the result."""
    print(line, file=sys.stderr, flush=True)


class Report:
    """Collects tables and targets of one benchmark."""

    def __init__(self, theme: str, title: str) -> None:
        self.theme = theme
        self.title = title
        self.tables: list[Table] = []
        self.targets: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.pictures: list[str] = []
        """Files beside the result."""
        self.drawings: list[str] = []
        """SVG documents; with one the result has a page for a browser, too."""

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Print a table now, and keep it."""
        table = Table(title=title, columns=columns, rows=[list(map(rounded, row)) for row in rows])
        print(aligned(table), flush=True)
        self.tables.append(table)

    def note(self, line: str) -> None:
        """A sentence for people."""
        print(line, flush=True)
        self.notes.append(line)

    def target(
        self,
        target_id: str,
        what: str,
        value: float | None,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        why: str = "",
    ) -> None:
        """One figure beside its target; None: not measured, which is not held.

        Args:
            target_id: of the targets.
            what: the figure.
            value: measured.
            at_least, at_most: the target, one of both.
            why: told where it is missed: what was measured that explains it.
        """
        held = value is not None and not math.isnan(value)
        held = held and (at_least is None or value >= at_least)
        held = held and (at_most is None or value <= at_most)
        bound = f">= {at_least:g}" if at_least is not None else f"<= {at_most:g}"
        found = {"id": target_id, "what": what, "value": value, "target": bound, "held": held}
        self.targets.append(found if held or not why else {**found, "why": why})

    def finish(self, arguments: argparse.Namespace, metrics: Any) -> int:
        """Print targets and the JSON line; save both when asked."""
        rows = [_target_row(target) for target in self.targets]
        if rows:
            self.table("targets", ["id", "figure", "value", "target", ""], rows)
        for target in self.targets:
            if "why" in target:
                self.note(f"{target['id']}, {target['what']}: {target['why']}.")
        document = {
            "schema": 1,
            "theme": self.theme,
            "date": today(),
            "commit": commit(),
            "hardware": hardware(),
            "versions": {name: version(name) for name in ("heddle-llm", "torch", "numpy")},
            "command": " ".join(["python", *sys.argv]),
            "quick": arguments.quick,
            "metrics": metrics,
            "targets": self.targets,
        }
        if arguments.save:
            self._save(document)
        print(json.dumps(document, allow_nan=False))
        return 0

    def _save(self, document: dict[str, Any]) -> None:
        base = RESULTS / stem(self.theme)
        RESULTS.mkdir(exist_ok=True)
        base.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
        base.with_suffix(".md").write_text(self._page(document))
        if self.drawings:
            base.with_suffix(".html").write_text(self._browser_page(document))

    def _page(self, document: dict[str, Any]) -> str:
        head = (
            f"# {self.title}, {document['date']}\n\n`{document['command']}` at commit "
            f"{document['commit']} on {document['hardware']}, torch {version('torch')}.\n"
        )
        parts = [head, *(f"{note}\n" for note in self.notes), *map(markdown, self.tables)]
        parts += [f"![{name}]({name})\n" for name in self.pictures]
        return "\n".join(parts)

    def _browser_page(self, document: dict[str, Any]) -> str:
        """Everything in one file that asks for no other."""
        source = (
            f"<code>{escape(document['command'])}</code> at commit {escape(document['commit'])} "
            f"on {escape(document['hardware'])}, torch {version('torch')}."
        )
        # A drawing's own prologue has no place inside a page.
        drawings = [drawing[drawing.index("<svg") :] for drawing in self.drawings]
        parts = [f"<h1>{escape(self.title)}, {document['date']}</h1>", f"<p>{source}</p>"]
        parts += [f"<p>{escape(note)}</p>" for note in self.notes]
        parts += [f"<figure>{drawing}</figure>" for drawing in drawings]
        parts += map(html_table, self.tables)
        return _BROWSER_PAGE.format(title=escape(self.title), body="\n".join(parts))


_BROWSER_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; }}
figure {{ margin: 1em 0; }}
figure svg {{ width: 100%; height: auto; }}
td {{ white-space: nowrap; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 0.15em 0.8em; text-align: right; border-bottom: 1px solid #ddd; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def _target_row(target: dict[str, Any]) -> list[Cell]:
    verdict = "held" if target["held"] else "MISSED"
    return [target["id"], target["what"], target["value"], target["target"], verdict]


def rounded(cell: Cell) -> Cell:
    """Three digits for people; `-` where nothing was measured."""
    if cell is None:
        return "-"
    return (
        f"{cell:.3g}"
        if isinstance(cell, float) and abs(cell) < 1000
        else (f"{cell:.0f}" if isinstance(cell, float) else cell)
    )


def markdown(table: Table) -> str:
    """A table of a page."""
    lines = [f"## {table.title}\n", "| " + " | ".join(table.columns) + " |"]
    lines.append("|" + "---|" * len(table.columns))
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in table.rows]
    return "\n".join(lines) + "\n"


def html_table(table: Table) -> str:
    """A table of a page for a browser."""
    lines = [("th", table.columns), *(("td", row) for row in table.rows)]
    rows = [
        "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"
        for tag, cells in lines
    ]
    return f"<h2>{escape(table.title)}</h2>\n<table>\n" + "\n".join(rows) + "\n</table>"


def stem(theme: str) -> str:
    """Of the files of a result of today."""
    return f"{theme}_{NUM_CORES}-cores_{today()}"


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def commit() -> str:
    """The commit of the tree, marked where it has changes; empty outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def hardware() -> str:
    """Processor, cores and system, without a name of host or user."""
    return f"{processor_name()}, {NUM_CORES} cores, {platform.system()} {platform.machine()}"
