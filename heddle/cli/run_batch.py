"""`heddle run-batch`: answer a file of requests, on a server or with a model of this process.

Each answer is written when it is there. A run that was stopped is taken up by the same command:
requests that succeeded are not asked again.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heddle.cli.flags import add_engine_flags, add_layout_flags, command_parser, engine_arguments
from heddle.cli.output import Output
from heddle.cli.parser import CommandParser
from heddle.cli.remote import is_url, refuse_engine_flags
from heddle.cli.run_batch_files import BatchLine, BatchOutput, read_batch
from heddle.cli.summaries import SUMMARIES
from heddle.cli.values import integer
from heddle.engine.args import engine_config
from heddle.errors import ConfigError, RankFailed, counted, quoted

SUMMARY = SUMMARIES["run-batch"]
PROGRESS_SECONDS = 10.0


def create_parser(environment: Mapping[str, str], output: Output) -> CommandParser:
    """Files, server or model, layout and engine flags."""
    parser = command_parser("run-batch", SUMMARY, environment, output)
    text = "demo, a folder, a .gguf file or a hub id; absent: give --url"
    parser.add_argument("model", metavar="MODEL", nargs="?", help=text)
    text = "requests, one JSON object per line"
    parser.declare("batch", "-i", "--input-file", metavar="FILE", help=text)
    text = "answers; lines of an earlier run that succeeded stay"
    parser.declare("batch", "-o", "--output-file", metavar="FILE", help=text)
    parser.declare("batch", "--url", metavar="URL", help="http://... of a server")
    parser.declare("batch", "--api-key", metavar="KEY", help="to show to the server")
    text = "names of MODEL in requests; absent: MODEL as it is given"
    parser.declare("batch", "--served-model-name", nargs="+", metavar="NAME", help=text)
    text = "most open requests"
    parser.declare(
        "batch", "--max-concurrency", type=integer, default=64, metavar="VALUE", help=text
    )
    text = "of a request whose server is full or has gone"
    parser.declare("batch", "--max-retries", type=integer, default=8, metavar="VALUE", help=text)
    add_layout_flags(parser)
    add_engine_flags(parser)
    return parser


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Ask what is left, and tell how it went; 1 if a request failed."""
    check(arguments)
    source, target = Path(arguments.input_file), Path(arguments.output_file)
    lines = read_batch(source)
    results = BatchOutput(target, {line.custom_id for line in lines if line.custom_id is not None})
    progress = Progress(results, len(lines), output)
    left = [line for line in lines if line.custom_id not in results.done]
    try:
        if left:
            _ask(arguments, left, progress, output)
    finally:
        progress.end()
        results.close()
    document = {
        "input": str(source),
        "output": str(target),
        "requests": len(lines),
        "succeeded": progress.num_done - progress.num_failed,
        "failed": progress.num_failed,
        "done_before": len(results.done),
    }
    if output.as_json:
        output.document(document)
    else:
        output.text(
            f"{counted(len(lines), 'request')}, {document['succeeded']} succeeded "
            f"({document['done_before']} before), {document['failed']} failed: {target}"
        )
    return 1 if progress.num_failed else 0


def check(arguments: argparse.Namespace) -> None:
    """Refuse a command line that says too little or too much.

    Raises:
        ConfigError: it does.
    """
    if arguments.input_file is None or arguments.output_file is None:
        raise ConfigError("-i FILE and -o FILE are needed")
    if Path(arguments.input_file).resolve() == Path(arguments.output_file).resolve():
        raise ConfigError("-i and -o name the same file")
    if (arguments.model is None) == (arguments.url is None):
        raise ConfigError("give MODEL or --url, one of them")
    if arguments.url is not None:
        if not is_url(arguments.url):
            raise ConfigError(
                f"--url {quoted(arguments.url)} is not a URL such as http://127.0.0.1:8000"
            )
        refuse_engine_flags(arguments)
        if arguments.served_model_name is not None:
            raise ConfigError("--served-model-name has no effect on a server elsewhere")
    for name, least in (("max_concurrency", 1), ("max_retries", 0)):
        value = getattr(arguments, name)
        if value < least:
            raise ConfigError(
                f"--{name.replace('_', '-')} {value} is not legal; it is at least {least} "
                f"(nearest: {least})"
            )


class Progress:
    """Writes lines of the output, counts them, and says so now and then."""

    def __init__(self, results: BatchOutput, total: int, output: Output) -> None:
        self.num_done = len(results.done)
        """Requests that ended, in this run and before."""
        self.num_failed = 0
        self._results, self._total, self._output = results, total, output
        self._told = time.monotonic()
        self._told_wait = ("", 0.0)

    def write(self, line: Mapping[str, Any]) -> None:
        """Take a line of the output."""
        self._results.write(line)
        self.num_done += 1
        self.num_failed += line["error"] is not None
        text = (
            f"{self.num_done} of {counted(self._total, 'request')} ended, {self.num_failed} failed"
        )
        log = self._output.log
        if log.isatty():
            log.write(f"\r{text}")  # one line that changes
            log.flush()
        elif time.monotonic() - self._told >= PROGRESS_SECONDS:
            self._told = time.monotonic()
            self._output.say(text)

    def note_wait(self, why: str) -> None:
        """A request waits to be asked again; said now and then, and at once when it is new."""
        is_new = why != self._told_wait[0]
        if is_new or time.monotonic() - self._told_wait[1] >= PROGRESS_SECONDS:
            self._told_wait = (why, time.monotonic())
            self._output.say(f"waiting: {why}")

    def end(self) -> None:
        """No more lines will come."""
        if self._output.log.isatty():
            self._output.say("")
        left = self._total - self.num_done
        if left:
            self._output.say(f"{counted(left, 'request')} left; the same command goes on")


def _ask(
    arguments: argparse.Namespace, lines: Sequence[BatchLine], progress: Progress, output: Output
) -> None:
    options = {
        "max_concurrency": arguments.max_concurrency,
        "max_retries": arguments.max_retries,
        "write": progress.write,
        "on_wait": progress.note_wait,
    }
    if arguments.url is not None:
        asyncio.run(_ask_server(arguments, lines, options))
        return
    config = engine_config(arguments.model, **engine_arguments(arguments))
    from heddle.server.loading import load_here  # imports torch

    llm = load_here(config, output.say)
    asyncio.run(_ask_model(llm, arguments, lines, options))


async def _ask_server(
    arguments: argparse.Namespace, lines: Sequence[BatchLine], options: Mapping[str, Any]
) -> None:
    from heddle.bench.http_load import create_client
    from heddle.cli.run_batch_client import run_lines

    async with create_client(arguments.url, arguments.api_key) as client:
        await run_lines(client, lines, **options)


async def _ask_model(
    llm: Any, arguments: argparse.Namespace, lines: Sequence[BatchLine], options: Mapping[str, Any]
) -> None:
    from heddle.cli.run_batch_client import run_lines
    from heddle.cli.run_batch_local import local_client

    names = arguments.served_model_name or ()
    async with local_client(llm, arguments.model, names, arguments.max_concurrency) as (
        client,
        engine,
    ):

        def check_engine() -> None:
            if engine.failure is not None:
                raise RankFailed(f"the engine has failed: {engine.failure}")

        await run_lines(client, lines, check=check_engine, **options)
