"""`heddle show`: who computes which row and who stores which token, for a layout, without starting
a process.

Everything printed is asked of the layout functions that the engine itself uses. Ownership repeats,
so runs are printed for one period: a million tokens are still one page.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from heddle.cli.flags import add_layout_flags, command_parser, layout_config
from heddle.cli.output import Output
from heddle.cli.parser import CommandParser
from heddle.cli.values import heads, size

if TYPE_CHECKING:
    from heddle.layout.rules import Verdict

SUMMARY = "print who computes which row and who stores which token; starts nothing"


def create_parser(environment: Mapping[str, str], output: Output) -> CommandParser:
    """Layout flags, lengths and head counts."""
    parser = command_parser("show", SUMMARY, environment, output)
    parser.declare(
        "show",
        "--seq-len",
        type=size,
        nargs="+",
        default=[64],
        metavar="TOKENS",
        help="lengths to show; each is one fresh prompt of a step",
    )
    parser.declare(
        "show", "--heads", type=heads, metavar="QUERY/KV", help="head counts of the model, as 32/8"
    )
    add_layout_flags(parser)
    return parser


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Print the layout, or every reason why it is refused."""
    from heddle.cli import ownership  # numpy comes with the layouts, and help does without
    from heddle.layout.rules import validate

    parallel = layout_config(arguments)
    verdict = validate(parallel, block_size=arguments.block_size, heads=arguments.heads)
    if not verdict.legal:
        return _refuse(verdict, output)
    document = ownership.describe(
        parallel,
        block_size=arguments.block_size,
        executor=arguments.executor,
        heads=arguments.heads,
        seq_lens=arguments.seq_len,
    )
    if output.as_json:
        output.document(document)
    else:
        for table in ownership.tables(document):
            output.table(table)
        for note in ownership.notes(parallel):
            output.text(note)
    return 0


def _refuse(verdict: Verdict, output: Output) -> int:
    """Every reason and the nearest legal layouts; a refused layout is exit 2."""
    if output.as_json:
        nearest = [suggestion.flags for suggestion in verdict.nearest]
        output.document({"legal": False, "reasons": list(verdict.reasons), "nearest": nearest})
    for reason in verdict.reasons:
        output.say(f"refused: {reason}")
    for legal in verdict.nearest:
        output.say(f"legal:   {legal}")
    return 2
