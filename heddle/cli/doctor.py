"""`heddle doctor`: what this machine is, what is installed on it, and what it measures, ready to be
pasted.

Nothing personal is printed: no host name, user name or path of the user.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from heddle.cli.flags import command_parser
from heddle.cli.output import Output, Table
from heddle.cli.parser import CommandParser
from heddle.cli.quantities import quantity

SUMMARY = "print machine, versions, backends, sockets and measured costs"


def create_parser(environment: Mapping[str, str], output: Output) -> CommandParser:
    """Only the common flags."""
    return command_parser("doctor", SUMMARY, environment, output)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Look, measure, print."""
    del arguments  # every command is called alike
    from heddle.cli.checkup import examine  # imports torch

    document = examine()
    if output.as_json:
        output.document(document)
    else:
        for table in tables(document):
            output.table(table)
    return 0


def tables(document: dict[str, Any]) -> list[Table]:
    """The document for people."""
    facts = ("machine", "versions", "bandwidth")
    found = [
        Table(title=key, columns=["what", "value"], rows=_quantities(document[key]))
        for key in facts
    ]
    for key in ("backends", "sockets", "collectives"):
        columns = list(document[key][0]) if document[key] else ["none"]
        rows = [[quantity(name, value) for name, value in row.items()] for row in document[key]]
        found.append(Table(title=key, columns=columns, rows=rows))
    return found


def _quantities(facts: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Names without their unit, values with it."""
    return [
        (name.removesuffix("_per_second").removesuffix("_bytes"), quantity(name, value))
        for name, value in facts.items()
    ]
