"""What a command says: one JSON document, or tables and text for people.

stdout carries the result alone; warnings and errors go to stderr. Tables are drawn with lines on a
terminal and as aligned columns elsewhere.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

Cell = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under column names, with a title."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where a command writes, and in which form.

    Attributes:
        as_json: print one JSON document instead of text and tables.
        stream: for results.
        log: for everything else.
    """

    as_json: bool = False
    stream: TextIO = sys.stdout
    log: TextIO = sys.stderr

    def document(self, document: dict[str, Any]) -> None:
        """Print the JSON form; NaN and infinity are not JSON and are refused."""
        print(json.dumps(document, allow_nan=False), file=self.stream)

    def text(self, line: str) -> None:
        """Print one line of the form for people."""
        print(line, file=self.stream)

    def table(self, table: Table) -> None:
        """Print one table of the form for people."""
        if self.stream.isatty():
            _draw(table, self.stream)
        else:
            print(aligned(table), file=self.stream)

    def say(self, line: str) -> None:
        """Print one line to the log."""
        print(line, file=self.log)


def aligned(table: Table) -> str:
    """A table as plain columns.

    Example:
        >>> print(aligned(Table(title="shares", columns=["rank", "kept"], rows=[[0, 11], [1, 9]])))
        shares
          rank  kept
          0     11
          1     9
    """
    cells = [[str(cell) for cell in row] for row in (table.columns, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    return "\n  ".join([table.title, *lines])


def _draw(table: Table, stream: TextIO) -> None:
    from rich.console import Console  # costs start-up time, so only where it is seen
    from rich.table import Table as RichTable

    drawn = RichTable(*table.columns, title=table.title, title_justify="left")
    for row in table.rows:
        drawn.add_row(*map(str, row))
    Console(file=stream).print(drawn)
