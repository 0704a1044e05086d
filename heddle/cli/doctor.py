"""`heddle doctor`: what this machine is, what is installed on it, and what it measures, ready to be
pasted; with a MODEL, what that model would need here, and whether it would run.

The measured costs are kept for engines that start on this machine later: they weigh calls, bytes
and arithmetic against each other. Nothing personal is printed: no host name, user name or path of
the user; the place of the kept costs goes to the log alone.

With a MODEL nothing is measured and nothing is loaded: headers and settings say all of it at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heddle.cli import dump_tables
from heddle.cli.flags import (
    ENGINE_FLAGS,
    LAYOUT_FLAGS,
    add_engine_flags,
    add_layout_flags,
    command_parser,
    engine_arguments,
)
from heddle.cli.output import Output, Table
from heddle.cli.parser import CommandParser
from heddle.cli.quantities import quantity
from heddle.cli.summaries import SUMMARIES
from heddle.config.link_costs import LinkCosts
from heddle.engine.args import engine_config
from heddle.engine.measured_costs import costs_path, store_costs
from heddle.errors import ConfigError
from heddle.faults.dump import read_dump
from heddle.models.weights.manifest import write_manifest

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
SUMMARY = SUMMARIES["doctor"]


def create_parser(environment: Mapping[str, str], output: Output) -> CommandParser:
    """A model, and the flags of the engine that would run it."""
    parser = command_parser("doctor", SUMMARY, environment, output)
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="demo, a folder or a .gguf file; not loaded"
    )
    parser.declare(
        "output",
        "--manifest",
        action="store_true",
        help="write sizes and sha256 sums of MODEL's files beside them; every load compares",
    )
    parser.declare(
        "output",
        "--calibrate",
        metavar="FILE",
        help="write what was measured as a sheet, which heddle plan --device FILE takes",
    )
    parser.declare(
        "output",
        "--dump",
        metavar="FILE",
        help="show what the ranks of a failed engine did last, from the file that its log names",
    )
    add_layout_flags(parser)
    add_engine_flags(parser)
    return parser


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Look, measure, print, keep the costs; or look at a model."""
    if arguments.calibrate is not None and arguments.model is not None:
        raise ConfigError(
            f"--calibrate measures the machine, not {arguments.model}; give one of them"
        )
    if arguments.manifest:
        return _write_manifest(arguments, output)
    if arguments.dump is not None:
        return _show_dump(arguments, output)
    if arguments.model is not None:
        return _run_on_model(arguments, output)
    _refuse_flags(arguments)
    from heddle.cli.checkup import examine  # imports torch

    document = examine()
    if arguments.calibrate is not None:
        from heddle.cli.checkup_steps import measure_steps

        output.say("steps of made-up models are timed, on one rank and on two; about a minute")
        document["steps"] = measure_steps()
    for link, costs in document["costs"].items():
        keep(link, LinkCosts(**costs), output)
    if arguments.calibrate is not None:
        _write_sheet(document, Path(arguments.calibrate).expanduser(), output)
    if output.as_json:
        output.document(document)
    else:
        for table in tables(document):
            output.table(table)
    return 0


def _write_sheet(document: Mapping[str, Any], path: Path, output: Output) -> None:
    """Keep what was measured for `heddle plan`."""
    from heddle.planner.calibrate import sheet_of
    from heddle.planner.devices import write_sheet

    try:
        write_sheet(sheet_of(document), path)
    except OSError as error:
        raise ConfigError(f"--calibrate {path} cannot be written: {error}") from error
    output.say(f"the sheet of this machine is in {path}; heddle plan --device {path} uses it")


def _write_manifest(arguments: argparse.Namespace, output: Output) -> int:
    """Sum up the files of a model that is here."""
    from heddle.cli.show_topology import local_path

    if arguments.model is None:
        raise ConfigError("--manifest sums up the files of a MODEL, and none is named")
    path = write_manifest(local_path(arguments.model, "doctor"))
    if output.as_json:
        output.document({"manifest": str(path)})
    else:
        output.text(f"sums are in {path}; every load of this model compares its files with them")
    return 0


def _show_dump(arguments: argparse.Namespace, output: Output) -> int:
    """Print what a driver wrote down when its ranks failed."""
    if arguments.model is not None:
        raise ConfigError(f"--dump says nothing about {arguments.model}; give one of them")
    _refuse_flags(arguments)
    dump = read_dump(arguments.dump)
    if output.as_json:
        output.document({"dump": dump_tables.document(dump)})
    else:
        for table in dump_tables.tables(dump):
            output.table(table)
    return 0


def _run_on_model(arguments: argparse.Namespace, output: Output) -> int:
    """Print what is found; a model that would not run is exit 2."""
    from heddle.cli import model_checkup, model_tables  # imports torch
    from heddle.cli.show_tables import wrapped
    from heddle.cli.show_topology import local_path

    path = local_path(arguments.model, "doctor")
    config = engine_config(arguments.model, **engine_arguments(arguments))
    document = model_checkup.examine_model(config, path)
    if output.as_json:
        output.document({"model": document})
    else:
        for table in model_tables.tables(document):
            output.table(table)
        for line in wrapped(model_tables.notes(document)):
            output.text(line)
    for reason in document["reasons"]:
        output.say(f"cannot run: {reason}")
    for legal in document["nearest"]:
        output.say(f"legal:      {legal}")
    return 2 if document["reasons"] else 0


def _refuse_flags(arguments: argparse.Namespace) -> None:
    """Flags of an engine say nothing about a machine."""
    for flag in (*LAYOUT_FLAGS, *ENGINE_FLAGS):
        if getattr(arguments, flag.variable) != flag.default:
            raise ConfigError(
                f"{flag.names[-1]} has no effect without a MODEL; doctor then measures the machine"
            )


def keep(link: str, costs: LinkCosts, output: Output) -> None:
    """Store the costs and say where; a folder that cannot be written is no failure of a checkup."""
    try:
        path = store_costs(costs, costs_path(link))
        output.say(f"costs over {link} are kept in {path}; engines that start here use them")
    except OSError as error:
        output.say(f"warning: costs are not kept, engines use defaults: {error}")


def tables(document: dict[str, Any]) -> list[Table]:
    """The document for people."""
    facts = {key: document[key] for key in ("machine", "versions", "bandwidth")}
    facts |= {f"costs over {link}": costs for link, costs in document["costs"].items()}
    found = [
        Table(title=title, columns=["what", "value"], rows=_quantities(values))
        for title, values in facts.items()
    ]
    for key in ("backends", "sockets", "collectives"):
        columns = list(document[key][0]) if document[key] else ["none"]
        rows = [[quantity(name, value) for name, value in row.items()] for row in document[key]]
        found.append(Table(title=key, columns=columns, rows=rows))
    if "steps" in document:
        found.append(_steps_table(document["steps"]))
    return found


def _steps_table(steps: Mapping[str, Mapping[str, float]]) -> Table:
    """Seconds by step and layout; `-` where a layout does not run it."""
    names = list(dict.fromkeys(name for found in steps.values() for name in found))
    rows = [
        [name, *(quantity("seconds", f[name]) if name in f else "-" for f in steps.values())]
        for name in names
    ]
    return Table(title="steps of made-up models", columns=["step", *steps], rows=rows)


def _quantities(facts: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Names without their unit, values with it."""
    return [
        (
            _COST_NAMES.get(name) or name.removesuffix("_per_second").removesuffix("_bytes"),
            quantity(_COST_UNITS.get(name, name), value),
        )
        for name, value in facts.items()
    ]
