"""`heddle serve`: an OpenAI-compatible server over any layout."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from heddle.cli.flags import (
    add_engine_flags,
    add_layout_flags,
    command_parser,
    engine_arguments,
)
from heddle.cli.output import Output, Table
from heddle.cli.parser import CommandParser
from heddle.cli.server_flags import add_server_flags, server_config
from heddle.cli.summaries import SUMMARIES
from heddle.engine.args import engine_config
from heddle.engine.executors.launch_info import LaunchInfo
from heddle.engine.machine import serve_launched_rank
from heddle.errors import ConfigError
from heddle.layout.layout_object import layout_object
from heddle.server.config import SECRETS

if TYPE_CHECKING:
    from heddle.server.serving import Serving

UNSHOWN = frozenset(("help", "json", "debug", "model", "config", "print_config"))
SUMMARY = SUMMARIES["serve"]


def create_parser(environment: Mapping[str, str], output: Output) -> CommandParser:
    """Model, server, layout and engine flags."""
    parser = command_parser("serve", SUMMARY, environment, output)
    words = "demo, a folder, a .gguf file or a hub id"
    parser.add_argument("place", metavar="MODEL", nargs="?", help=words)
    parser.declare("output", "--config", metavar="FILE", help="flags in YAML, by long name")
    parser.declare("output", "--model", metavar="MODEL", help="instead of the first word")
    parser.declare(
        "output", "--print-config", action="store_true", help="print each value and its origin"
    )
    add_server_flags(parser)
    add_layout_flags(parser)
    add_engine_flags(parser)
    return parser


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Serve until a signal."""
    settings = server_config(arguments)
    if (arguments.place is None) == (arguments.model is None):
        raise ConfigError("name one MODEL: as the first word, with --model or in --config")
    config = engine_config(arguments.place or arguments.model, **engine_arguments(arguments))
    if arguments.print_config:
        _print_config(arguments, output)
        return 0
    launch = LaunchInfo.from_environment(os.environ)
    if launch is not None and launch.rank != 0:
        serve_launched_rank(config, launch)
        return 0
    if config.executor == "auto" and launch is None:
        # Ranks beside the server: its loop answers while they compute, and survives them.
        config = dataclasses.replace(config, executor="processes")
    from heddle.server.run import serve  # imports the framework

    def on_ready(serving: Serving, url: str) -> None:
        if output.as_json:
            output.document(describe(serving, url))
            sys.stdout.flush()

    return serve(config, settings, launch=launch, on_ready=on_ready)


def _print_config(arguments: argparse.Namespace, output: Output) -> None:
    """Every value with its origin; keys are not shown."""
    parser: CommandParser = arguments.parser
    rows = []
    for name in sorted({action.dest for action in parser.flags.values()} - UNSHOWN):
        value = getattr(arguments, name, None)
        hidden = "***" if name in SECRETS and value else value
        rows.append([name.replace("_", "-"), str(hidden), parser.origins.get(name, "default")])
    rows.insert(0, ["model", str(arguments.place or arguments.model), "given"])
    if output.as_json:
        output.document({row[0]: {"value": row[1], "origin": row[2]} for row in rows})
    else:
        output.table(Table(title="configuration", columns=["flag", "value", "origin"], rows=rows))


def describe(serving: Serving, url: str) -> dict[str, object]:
    """What a script wants to know once the server is ready."""
    plan = serving.plan
    return {
        "url": url,
        "pid": os.getpid(),
        "layout": layout_object(
            plan.parallel, block_size=plan.cache.block_size, executor=plan.executor
        ),
        "kv_tokens_total": serving.capacity.kv_tokens_total,
        "longest_prompt": serving.capacity.longest_prompt,
    }
