"""`heddle show`: who computes which row, who stores which token, and what a step sends.

It needs a layout and, if there is one, a model's configuration; no process is started.

Everything printed is asked of the layout and planning functions that the engine itself uses.
Ownership repeats, so runs are printed for one period: a million tokens are still one page.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from heddle.cli.flags import add_layout_flags, command_parser, layout_config
from heddle.cli.output import Output
from heddle.cli.parser import CommandParser
from heddle.cli.summaries import SUMMARIES
from heddle.cli.values import heads, size
from heddle.config import ModelConfig, ParallelConfig
from heddle.errors import ConfigError

if TYPE_CHECKING:
    from heddle.layout.rules import Verdict

SUMMARY = SUMMARIES["show"]


def create_parser(environment: Mapping[str, str], output: Output) -> CommandParser:
    """Model, layout flags, lengths and head counts."""
    parser = command_parser("show", SUMMARY, environment, output)
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="demo, a folder, a .gguf file, or a name such as deepseek-v3; weights stay",
    )
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
        "show",
        "--heads",
        type=heads,
        metavar="QUERY/KV",
        help="head counts in place of a MODEL, as 32/8",
    )
    add_layout_flags(parser)
    return parser


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Print the layout, or every reason why it is refused."""
    from heddle.cli.show_topology import find_model  # numpy comes with it, and help does without
    from heddle.layout.rules import validate

    if arguments.model is not None and arguments.heads is not None:
        raise ConfigError("MODEL and --heads are both given; give one")
    model = None if arguments.model is None else find_model(arguments.model)
    parallel = layout_config(arguments)
    verdict = validate(
        parallel, block_size=arguments.block_size, model=model, heads=arguments.heads
    )
    if not verdict.legal:
        return _refuse(verdict, output)
    document, notes = describe(arguments, parallel, model)
    if output.as_json:
        output.document(document)
    else:
        _print(document, notes, output)
    return 0


def describe(
    arguments: argparse.Namespace, parallel: ParallelConfig, config: ModelConfig | None
) -> tuple[dict[str, Any], list[str]]:
    """The document of a legal layout, and what a reader of its tables should know."""
    from heddle.cli.outline import outline
    from heddle.cli.ownership import notes
    from heddle.cli.show_topology import ShownModel, assume_model, create_topology
    from heddle.cli.step_sketch import sketch_step
    from heddle.layout.layout_object import layout_object
    from heddle.view import ownership

    model = (
        assume_model(arguments.heads, parallel)
        if config is None
        else ShownModel(config=config, name=arguments.model)
    )
    # An assumed model has no experts to deal out.
    planned = replace(parallel, enable_expert_parallel=False) if config is None else parallel
    shown = create_topology(
        model.config,
        planned,
        block_size=arguments.block_size,
        dtype=arguments.dtype,
        kv_cache_dtype=arguments.kv_cache_dtype,
    )
    layout = layout_object(parallel, block_size=arguments.block_size, executor=arguments.executor)
    document = ownership.describe(
        parallel, layout=layout, heads=model.heads, seq_lens=arguments.seq_len
    )
    document |= {"model": model.document()}
    document |= outline(shown.topology, is_known=config is not None)
    document |= {"step": sketch_step(shown, max(arguments.seq_len))}
    return document, [*model.notes, *notes(parallel)]


def _print(document: dict[str, Any], notes: list[str], output: Output) -> None:
    from heddle.cli import ownership, show_tables

    tables = [
        *ownership.tables(document),
        *show_tables.outline_tables(document),
        *show_tables.step_tables(document),
    ]
    for table in tables:
        output.table(table)
    for line in show_tables.wrapped([*document["step"]["reasons"], *notes]):
        output.text(line)


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
