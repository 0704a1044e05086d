"""`heddle bench serve`: a load of random prompts on any OpenAI-shaped server.

Names of flags, lines and figures are those of vLLM's benchmark of the same name. Failures are
counted and told, never dropped; with any, the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import platform
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heddle.cli.bench_serve_flags import add_flags, check_load, read_report
from heddle.cli.flags import command_parser
from heddle.cli.output import Output
from heddle.cli.parser import CommandParser, normalise
from heddle.cli.summaries import SUMMARIES
from heddle.errors import ConfigError, counted

if TYPE_CHECKING:
    from heddle.bench.http_load_prompts import Prompt
    from heddle.bench.serving_report import RequestRecord

SUMMARY = SUMMARIES["bench serve"]
MAX_TOLD_ERRORS = 5
PROGRESS_SECONDS = 10.0


def create_parser(environment: Mapping[str, str], output: Output) -> CommandParser:
    """Server, load, prompts, and what to report."""
    parser = command_parser("bench serve", SUMMARY, environment, output)
    add_flags(parser)
    return parser


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Load the server and print."""
    report = read_report(arguments)
    check_load(arguments)
    if arguments.save_result and not Path(arguments.result_dir).is_dir():
        raise ConfigError(f"--result-dir {arguments.result_dir} is not a folder")
    records, duration, server = asyncio.run(_measure(arguments, output))
    from heddle.bench.serving_report import lines, summarize

    figures = summarize(
        records, duration=duration, percentiles=report.percentiles, goodput=report.goodput
    )
    document = {
        **_facts(arguments, server),
        **figures,
        "requests": [record.document() for record in records],
    }
    if arguments.save_result:
        output.say(f"saved in {save(document, Path(arguments.result_dir))}")
    if output.as_json:
        output.document(document)
    else:
        for line in lines(
            figures,
            metrics=report.metrics,
            percentiles=report.percentiles,
            request_rate=arguments.request_rate,
            max_concurrency=arguments.max_concurrency,
        ):
            output.text(line.rstrip())
    _tell_errors(records, output)
    return 1 if figures["failed"] else 0


async def _measure(
    arguments: argparse.Namespace, output: Output
) -> tuple[list[RequestRecord], float, dict[str, Any]]:
    from heddle.bench import http_load

    base_url = arguments.base_url or f"http://{_bracketed(arguments.host)}:{arguments.port}"
    async with http_load.create_client(base_url, arguments.api_key) as client:
        ready = partial(http_load.within, arguments.ready_check_timeout_sec, client)
        model = arguments.model or await ready(partial(http_load.first_model, client))
        pool: Sequence[int] = range(arguments.vocab_size or 0)
        if not pool and arguments.endpoint == http_load.COMPLETIONS:
            pool = await ready(partial(http_load.token_pool, client, model))
        # One more than is measured: the first request must not warm the cache for another one.
        first, *prompts = _prompts(arguments, pool)
        extra = {"temperature": arguments.temperature}
        load = http_load.Load(
            endpoint=arguments.endpoint,
            model=model,
            prompts=[first],
            output_len=arguments.random_output_len,
            request_rate=arguments.request_rate,
            burstiness=arguments.burstiness,
            max_concurrency=arguments.max_concurrency,
            seed=arguments.seed,
            extra=extra | ({"ignore_eos": True} if arguments.ignore_eos else {}),
        )
        if arguments.ready_check_timeout_sec > 0:
            await ready(partial(http_load.answer_once, client, load))
        load = dataclasses.replace(load, prompts=prompts)
        records, duration = await http_load.run_load(client, load, _progress(output, len(prompts)))
        return records, duration, {"base_url": base_url, "model": model}


def _prompts(arguments: argparse.Namespace, pool: Sequence[int]) -> list[Prompt]:
    """One for the first request, and those that are measured; of words where there are no ids."""
    from heddle.bench.http_load_prompts import text_prompts, token_prompts

    sizes = {
        "num": arguments.num_prompts + 1,
        "length": arguments.random_input_len,
        "prefix": arguments.random_prefix_len,
        "seed": arguments.seed,
    }
    return token_prompts(pool, **sizes) if pool else text_prompts(**sizes)


def save(document: Mapping[str, Any], folder: Path) -> Path:
    """Write a result; its name tells rate, model and time.

    Args:
        document: of the load.
        folder: that exists.
    """
    when = document["date"].replace("-", "").replace(":", "")
    model = document["model"].rstrip("/").rpartition("/")[2]
    path = folder / f"serve-{document['request_rate']}qps-{model}-{when}.json"
    path.write_text(json.dumps(document, allow_nan=False) + "\n", encoding="utf-8")
    return path


def _facts(arguments: argparse.Namespace, server: Mapping[str, Any]) -> dict[str, Any]:
    """Where a result comes from: client, server and the load that was asked for."""
    from heddle import __version__
    from heddle.engine.measured_costs import machine_name

    rate = arguments.request_rate
    return {
        "subject": "serve",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hardware": f"{machine_name()}, {platform.system()}",
        "versions": {"heddle": __version__, "python": platform.python_version()},
        "command": shlex.join(["heddle", *without_key(sys.argv[1:])]),
        **server,
        "endpoint": arguments.endpoint,
        "num_prompts": arguments.num_prompts,
        "request_rate": "inf" if rate == math.inf else rate,
        "burstiness": arguments.burstiness,
        "max_concurrency": arguments.max_concurrency,
        "random_input_len": arguments.random_input_len,
        "random_output_len": arguments.random_output_len,
        "random_prefix_len": arguments.random_prefix_len,
        "seed": arguments.seed,
    }


def without_key(words: Sequence[str]) -> list[str]:
    """A command line whose key is not shown.

    Example:
        >>> without_key(["--api-key", "secret", "--seed", "1", "--api_key=secret"])
        ['--api-key', '...', '--seed', '1', '--api_key=...']
    """
    shown: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        name, equals, _ = word.partition("=")
        if normalise(before) == "--api-key":
            shown.append("...")
        else:
            shown.append(name + "=..." if equals and normalise(name) == "--api-key" else word)
    return shown


def _progress(output: Output, total: int) -> Callable[[RequestRecord], None]:
    """A line now and then; on a terminal and elsewhere the same."""
    done = failed = 0
    told = time.monotonic()

    def note(record: RequestRecord) -> None:
        nonlocal done, failed, told
        done, failed = done + 1, failed + (record.error is not None)
        if time.monotonic() - told >= PROGRESS_SECONDS:
            told = time.monotonic()
            output.say(f"{done} of {counted(total, 'request')} ended, {failed} failed")

    return note


def _tell_errors(records: Sequence[RequestRecord], output: Output) -> None:
    errors = Counter(record.error for record in records if record.error is not None)
    for message, count in errors.most_common(MAX_TOLD_ERRORS):
        output.say(f"{count} failed: {message}")
    if len(errors) > MAX_TOLD_ERRORS:
        output.say(f"{len(errors) - MAX_TOLD_ERRORS} more reasons; --json gives all")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
