"""`heddle chat`: talk with a model of this process, or of any OpenAI-shaped server.

On a terminal lines are typed; elsewhere each line of stdin is a turn. Answers go to stdout, all
else to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from heddle.cli.flags import add_engine_flags, add_layout_flags, command_parser, engine_arguments
from heddle.cli.output import Output
from heddle.cli.parser import CommandParser
from heddle.cli.remote import is_url, refuse_engine_flags
from heddle.cli.summaries import SUMMARIES
from heddle.cli.values import integer, number, size
from heddle.config import SamplingParams
from heddle.engine.args import engine_config
from heddle.errors import ConfigError

if TYPE_CHECKING:
    from heddle.cli.chat_partners import Partner

SUMMARY = SUMMARIES["chat"]
SAMPLING: Mapping[str, tuple[Callable[[str], Any], str]] = {
    "max_tokens": (size, "most tokens of an answer; absent: all the room"),
    "temperature": (number, "0 takes the most likely token"),
    "top_p": (number, "smallest set of tokens with this mass"),
    "top_k": (integer, "most likely tokens kept; 0 keeps all"),
    "min_p": (number, "least probability, relative to the most likely token"),
    "presence_penalty": (number, "taken off tokens of the answer so far"),
    "frequency_penalty": (number, "taken off per occurrence in the answer so far"),
    "repetition_penalty": (number, "divides logits of tokens seen so far"),
}
"""Flags that are fields of a request; one that is absent is left to the model or the server."""


def create_parser(environment: Mapping[str, str], output: Output) -> CommandParser:
    """Partner, sampling, layout and engine flags."""
    parser = command_parser("chat", SUMMARY, environment, output)
    text = "http://... of a server; or demo, a folder, a .gguf file, a hub id"
    parser.add_argument("target", metavar="URL|MODEL", nargs="?", default="demo", help=text)
    parser.declare("chat", "--system", metavar="TEXT", help="message before all others")
    parser.declare(
        "chat", "--model", metavar="NAME", help="of a server's models; absent: its first"
    )
    parser.declare("chat", "--api-key", metavar="KEY", help="to show to the server")
    for name, (kind, text) in SAMPLING.items():
        flag = "--" + name.replace("_", "-")
        parser.declare("sampling", flag, type=kind, default=None, metavar="VALUE", help=text)
    parser.declare(
        "sampling", "--stop", action="append", default=[], metavar="TEXT", help="may be repeated"
    )
    add_layout_flags(parser)
    add_engine_flags(parser)
    return parser


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Talk until the input ends; 1 if a turn failed."""
    if sys.stdin is None:
        raise ConfigError("stdin is closed; a conversation is read from there")
    from heddle.cli.chat_talk import HELP, Talk

    with asyncio.Runner() as runner:
        partner = _open(arguments, runner, output)
        try:
            talk = Talk(partner, runner, output, arguments.system)
            if sys.stdin.isatty():
                output.say(f"{partner.name}: {HELP}")
            talk.run(sys.stdin)
        finally:
            runner.run(partner.close())
    if output.as_json:
        output.document(talk.transcript())
    return 1 if any(turn.error is not None for turn in talk.turns) else 0


def sampling_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of a request that were given."""
    fields = {name: getattr(arguments, name) for name in SAMPLING}
    fields["stop"] = arguments.stop or None
    return {name: value for name, value in fields.items() if value is not None}


def _open(arguments: argparse.Namespace, runner: asyncio.Runner, output: Output) -> Partner:
    sampling = sampling_fields(arguments)
    if is_url(arguments.target):
        refuse_engine_flags(arguments)
        return runner.run(_reach(arguments, sampling))
    if arguments.model is not None:
        raise ConfigError("--model has no effect without the URL of a server")
    config = engine_config(arguments.target, **engine_arguments(arguments))
    SamplingParams(**sampling)  # a value that is not legal is refused before a model is loaded
    from heddle.cli.chat_local import LocalPartner
    from heddle.server.loading import load_here  # imports torch

    llm = load_here(config, output.say)

    async def attach() -> Partner:
        return LocalPartner(llm, arguments.target, sampling)

    try:
        return runner.run(attach())
    except BaseException:
        llm.close()
        raise


async def _reach(arguments: argparse.Namespace, sampling: Mapping[str, Any]) -> Partner:
    from heddle.bench.http_load import create_client, first_model, within
    from heddle.cli.chat_partners import RemotePartner

    client = create_client(arguments.target, arguments.api_key)
    try:
        name = arguments.model or await within(0, client, partial(first_model, client))
    except BaseException:
        await client.aclose()
        raise
    return RemotePartner(client, name, sampling)
