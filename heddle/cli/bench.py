"""`heddle bench`: what this machine makes of a model and a layout, in figures that can be compared.

Peers (`--vs`) answer the same prompts in the same run, in turn; their times count only beside equal
tokens. Absolute figures move with the machine; ratios of one run are what to look at.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heddle.cli.flags import add_engine_flags, add_layout_flags, command_parser, engine_arguments
from heddle.cli.output import Output
from heddle.cli.parser import CommandParser
from heddle.cli.summaries import SUMMARIES
from heddle.cli.values import integer, size
from heddle.config import EngineConfig
from heddle.engine.args import engine_config
from heddle.errors import ConfigError

SUMMARY = SUMMARIES["bench"]
SUBJECTS = ("latency", "throughput", "attention", "exchange", "step")
SERVE = "serve"
"""A command of its own (`heddle.cli.bench_serve`), since what it times runs elsewhere."""
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "latency": {
        "prompt_lens": [512, 2048],
        "max_tokens": 32,
        "rounds": 2,
        "vs": [],
        "peers_dir": None,
    },
    "throughput": {
        "prompt_lens": [512],
        "streams": [1, 4, 8],
        "max_tokens": 32,
        "rounds": 2,
        "vs": [],
        "peers_dir": None,
    },
    "attention": {"prompt_lens": [4096, 32768], "streams": [1], "new_rows": 1, "rounds": 5},
    "exchange": {},
    "step": {"prompt_lens": [128], "streams": [32], "max_tokens": 16},
}
"""Flags that each subject has, with their defaults; any other flag would have no effect."""


def create_parser(environment: Mapping[str, str], output: Output) -> CommandParser:
    """Subject, model, sizes, peers, layout and engine flags."""
    parser = command_parser("bench", SUMMARY, environment, output)
    parser.add_argument(
        "subject",
        metavar="SUBJECT",
        choices=(*SUBJECTS, SERVE),
        help=f"{', '.join(SUBJECTS)}; {SERVE} has flags of its own: heddle bench serve --help",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default="demo",
        help="demo, a folder, a .gguf file or a hub id",
    )
    _declare_sizes(parser)
    parser.declare(
        "bench", "--vs", nargs="+", metavar="PEER", help="engines to run in the same run"
    )
    parser.declare(
        "bench", "--peers-dir", metavar="DIR", help="where benchmarks/peers/setup.py put them"
    )
    add_layout_flags(parser)
    add_engine_flags(parser)
    return parser


def _declare_sizes(parser: CommandParser) -> None:
    def declare(name: str, kind: Any, text: str, **options: Any) -> None:
        parser.declare("bench", name, type=kind, metavar="VALUE", help=text, **options)

    several = {"nargs": "+"}
    declare("--prompt-lens", size, "tokens of prompts; attention: of contexts", **several)
    declare("--streams", size, "sequences at once", **several)
    declare("--max-tokens", size, "tokens of an answer; step: decode steps that count")
    declare("--new-rows", size, "rows that meet the context: 1 decodes, more prefill")
    declare("--rounds", integer, "times that each contestant runs")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Measure and print."""
    if arguments.subject == SERVE:
        raise ConfigError("serve stands right behind bench: heddle bench serve ...")
    asked = settings(arguments)
    config = engine_config(arguments.model, **engine_arguments(arguments))
    document = {"subject": arguments.subject, **_measure(arguments.subject, config, asked, output)}
    if output.as_json:
        output.document(document)
    else:
        from heddle.cli.bench_tables import tables

        for table in tables(document):
            output.table(table)
    return 0


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Values of the subject's own flags.

    Raises:
        ConfigError: a flag without effect, a count below its least, or several where one fits.
    """
    defaults = DEFAULTS[arguments.subject]
    own = {name for flags in DEFAULTS.values() for name in flags}
    for name in sorted(own - set(defaults)):
        if getattr(arguments, name) is not None:
            raise ConfigError(
                f"{_flag(name)} has no effect on heddle bench {arguments.subject}; it has: "
                f"{', '.join(map(_flag, defaults)) or 'layout and engine flags alone'}"
            )
    given = {name: getattr(arguments, name) for name in defaults}
    found = {name: defaults[name] if given[name] is None else given[name] for name in defaults}
    for name, least in (("max_tokens", 2), ("rounds", 1), ("new_rows", 1)):
        if name in found and found[name] < least:
            raise ConfigError(
                f"{_flag(name)} {found[name]} is not legal; it is at least {least} "
                f"(nearest: {least})"
            )
    for name in ("prompt_lens", "streams"):
        if min(found.get(name, [1])) < 1:
            raise ConfigError(f"{_flag(name)} 0 is not legal; it is at least 1 (nearest: 1)")
    _check_single(arguments.subject, found)
    return found


def _check_single(subject: str, found: Mapping[str, Any]) -> None:
    for name in _SINGLES.get(subject, ()):
        if len(found[name]) > 1:
            raise ConfigError(
                f"heddle bench {subject} takes one {_flag(name)}; {len(found[name])} are given"
            )


_SINGLES: Mapping[str, tuple[str, ...]] = {
    "throughput": ("prompt_lens",),
    "attention": ("streams",),
    "step": ("prompt_lens", "streams"),
}
"""Flags with a list of values of which a subject takes one."""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _measure(
    subject: str, config: EngineConfig, asked: Mapping[str, Any], output: Output
) -> dict[str, Any]:
    """Imports torch, as each of the measuring modules does."""
    if subject == "exchange":
        from heddle.bench.exchange import measure_exchange

        return measure_exchange(config)
    if subject == "step":
        from heddle.bench.step import measure_step

        return measure_step(
            config,
            num_streams=asked["streams"][0],
            prompt_len=asked["prompt_lens"][0],
            num_steps=asked["max_tokens"],
        )
    if subject == "attention":
        return _measure_attention(config, asked, output)
    from heddle.bench.peer import default_peers_dir
    from heddle.bench.speed import measure_latency, measure_throughput

    common = {
        "num_tokens": asked["max_tokens"],
        "rounds": asked["rounds"],
        "peers": asked["vs"],
        "peers_dir": Path(asked["peers_dir"] or default_peers_dir()),
        "report": output.say,
    }
    lengths = asked["prompt_lens"]
    if subject == "latency":
        return measure_latency(config, prompt_lens=lengths, **common)
    return measure_throughput(config, prompt_len=lengths[0], streams=asked["streams"], **common)


def _measure_attention(
    config: EngineConfig, asked: Mapping[str, Any], output: Output
) -> dict[str, Any]:
    from heddle.bench.attention import measure_contexts, with_threads
    from heddle.bench.paged_case import AttentionShape
    from heddle.engine.machine import resolve_here

    resolved = resolve_here(config)
    with with_threads(resolved.num_threads * resolved.parallel.world_size):
        cases = measure_contexts(
            AttentionShape.of(resolved.model),
            asked["prompt_lens"],
            num_rows=asked["new_rows"],
            num_streams=asked["streams"][0],
            block_size=resolved.cache.block_size,
            kv_cache_dtype=resolved.kv_cache_dtype,
            rounds=asked["rounds"],
            report=output.say,
            backends=None if config.backend == "auto" else [config.backend],
            kernels=config.kernels,
        )
    return {"num_threads": resolved.num_threads, "cases": cases}
