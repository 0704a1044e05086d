"""`heddle doctor`: what this machine is, what is installed on it, and what it measures, ready to be
pasted.

The measured costs are kept for engines that start on this machine later: they weigh calls, bytes
and arithmetic against each other. Nothing personal is printed: no host name, user name or path of
the user; the place of the kept costs goes to the log alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from heddle.cli.flags import command_parser
from heddle.cli.output import Output, Table
from heddle.cli.parser import CommandParser
from heddle.cli.quantities import quantity
from heddle.config.link_costs import LinkCosts
from heddle.engine.measured_costs import store_costs

_COST_NAMES = {
    "alpha": "empty call (alpha)",
    "beta": "received (beta)",
    "flops": "matrix product of a rank (flops)",
    "memory": "read by a rank (memory)",
}
_COST_UNITS = {
    "alpha": "seconds",
    "beta": "bytes_per_second",
    "flops": "flops",
    "memory": "bytes_per_second",
}
SUMMARY = "print machine, versions, backends, sockets and measured costs"


def create_parser(environment: Mapping[str, str], output: Output) -> CommandParser:
    """Only the common flags."""
    return command_parser("doctor", SUMMARY, environment, output)


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Look, measure, print, keep the costs."""
    del arguments  # every command is called alike
    from heddle.cli.checkup import examine  # imports torch

    document = examine()
    keep(LinkCosts(**document["costs"]), output)
    if output.as_json:
        output.document(document)
    else:
        for table in tables(document):
            output.table(table)
    return 0


def keep(costs: LinkCosts, output: Output) -> None:
    """Store the costs and say where; a folder that cannot be written is no failure of a checkup."""
    try:
        output.say(f"costs are kept in {store_costs(costs)}; engines that start here use them")
    except OSError as error:
        output.say(f"warning: costs are not kept, engines use defaults: {error}")


def tables(document: dict[str, Any]) -> list[Table]:
    """The document for people."""
    facts = ("machine", "versions", "bandwidth", "costs")
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
        (
            _COST_NAMES.get(name) or name.removesuffix("_per_second").removesuffix("_bytes"),
            quantity(_COST_UNITS.get(name, name), value),
        )
        for name, value in facts.items()
    ]
