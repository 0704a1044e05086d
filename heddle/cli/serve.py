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
from heddle.cli.layout_object import layout_object
from heddle.cli.output import Output
from heddle.cli.parser import CommandParser
from heddle.cli.server_flags import add_server_flags, server_config
from heddle.engine.args import engine_config
from heddle.engine.executors.launch_info import LaunchInfo
from heddle.engine.machine import serve_launched_rank

if TYPE_CHECKING:
    from heddle.server.serving import Serving

SUMMARY = "serve a model over HTTP, as OpenAI's API"


def create_parser(environment: Mapping[str, str], output: Output) -> CommandParser:
    """Model, server, layout and engine flags."""
    parser = command_parser("serve", SUMMARY, environment, output)
    parser.add_argument("model", metavar="MODEL", help="demo, a folder, a .gguf file or a hub id")
    add_server_flags(parser)
    add_layout_flags(parser)
    add_engine_flags(parser)
    return parser


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Serve until a signal."""
    settings = server_config(arguments)
    config = engine_config(arguments.model, **engine_arguments(arguments))
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

    return serve(config, settings, launch=launch, on_ready=on_ready, say=output.say)


def describe(serving: Serving, url: str) -> dict[str, object]:
    """What a script wants to know once the server is ready."""
    plan = serving.plan
    return {
        "url": url,
        "pid": os.getpid(),
        "layout": layout_object(
            plan.parallel, block_size=plan.cache.block_size, executor=plan.executor
        ),
        "kv_tokens_total": serving.kv_tokens_total,
        "longest_prompt": serving.longest_prompt,
    }
