"""`heddle warmup`: compile what a model and layout will need, so that the first start need not.

Object code is kept on disk, under a digest of its sources; a second call finds everything there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

from heddle.cli.flags import add_engine_flags, add_layout_flags, command_parser, engine_arguments
from heddle.cli.output import Output, Table
from heddle.cli.parser import CommandParser
from heddle.cli.summaries import SUMMARIES
from heddle.config import ResolvedConfig
from heddle.engine.args import engine_config
from heddle.engine.machine import resolve_here
from heddle.kernels.warmup import compile_here, operations

SUMMARY = SUMMARIES["warmup"]


def create_parser(environment: Mapping[str, str], output: Output) -> CommandParser:
    """Model, layout and engine flags."""
    parser = command_parser("warmup", SUMMARY, environment, output)
    parser.add_argument(
        "model", metavar="MODEL", help="demo, a folder, a .gguf file or a hub id; not loaded"
    )
    add_layout_flags(parser)
    add_engine_flags(parser)
    return parser


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Compile, with a line for each operation, and say what is there."""
    resolved = resolve_here(engine_config(arguments.model, **engine_arguments(arguments)))
    names, started = (
        operations(resolved.kernels, resolved.backend, resolved.kv_cache_dtype),
        time.monotonic(),
    )
    compiled = compile_here(names, output.say)
    document = describe(resolved, names, compiled, time.monotonic() - started)
    if output.as_json:
        output.document(document)
    else:
        rows = [(row["name"], row["state"]) for row in document["operations"]]
        output.table(Table(title="compiled kernels", columns=("operation", "state"), rows=rows))
    return 0


def describe(
    resolved: ResolvedConfig, names: Sequence[str], compiled: Sequence[str], seconds: float
) -> dict[str, Any]:
    """What runs, and which of its operations were compiled just now."""
    return {
        "kernels": resolved.kernels,
        "backend": resolved.backend,
        "operations": [
            {"name": name, "state": "compiled now" if name in compiled else "was there"}
            for name in names
        ],
        "seconds": seconds,
    }
