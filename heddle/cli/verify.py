"""`heddle verify`: certify layouts of a model against one rank."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from heddle.cli.flags import add_engine_flags, add_layout_flags, command_parser, engine_arguments
from heddle.cli.output import Output, Table
from heddle.cli.parser import CommandParser
from heddle.cli.summaries import SUMMARIES
from heddle.cli.values import integer, size
from heddle.config import EngineConfig, ModelConfig
from heddle.errors import ConfigError
from heddle.layout.layout_object import degrees_text

if TYPE_CHECKING:
    from heddle.verify.tasks import Task
    from heddle.verify.trials import Trial

SUMMARY = SUMMARIES["verify"]
DEGREES = ("tp", "pcp", "dcp")
TASKS = ("perplexity", "passkey")
OUTER_DEGREES = ("pp", "dp")
"""Shown only where they add ranks."""
STRATEGY = ("interleave", "exchange", "context_exchange")
COLUMNS = (
    *STRATEGY,
    "max_abs_logit_diff",
    "tokens_equal",
    "near_ties",
    "ok",
)
TASK_COLUMNS = {
    "perplexity": (*STRATEGY, "value", "difference", "ok"),
    "passkey": (*STRATEGY, "accuracy", "same_answers", "ok"),
}


def create_parser(environment: Mapping[str, str], output: Output) -> CommandParser:
    """Model, what to sweep, layout and engine flags."""
    parser = command_parser("verify", SUMMARY, environment, output)
    parser.add_argument("model", metavar="MODEL", help="demo, a folder, a .gguf file or a hub id")
    parser.declare(
        "verify",
        "--world",
        type=integer,
        metavar="RANKS",
        help="certify every legal (tp, pcp, dcp) of so many ranks; 2 unless a layout is given",
    )
    parser.declare(
        "verify",
        "--all",
        action="store_true",
        help="each layout with every exchange, and with interleave 1, 2 and the block size",
    )
    parser.declare(
        "verify",
        "--max-tokens",
        type=size,
        default=32,
        metavar="TOKENS",
        help="tokens of each answer, without --task",
    )
    parser.declare(
        "verify",
        "--task",
        choices=TASKS,
        help="compare a task instead of logits: how well the text that comes with heddle is "
        "predicted, or which keys are found in it",
    )
    add_layout_flags(parser)
    add_engine_flags(parser)
    return parser


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Certify and print; exit 1 when a layout differs."""
    from heddle.engine.args import engine_config
    from heddle.layout.resolve import MAX_DEGREE
    from heddle.models.config_json import load_model_config
    from heddle.models.sources import resolve_model_path
    from heddle.verify.trials import create_trials, is_explicit

    config = engine_config(arguments.model, **engine_arguments(arguments))
    if arguments.world is not None and is_explicit(config.parallel):
        raise ConfigError("--world and a layout are both given; --world sweeps tp, pcp and dcp")
    if arguments.world is not None and not 1 <= arguments.world <= MAX_DEGREE:
        nearest = 1 if arguments.world < 1 else MAX_DEGREE
        raise ConfigError(
            f"--world {arguments.world} is not legal; a world has at least 1 rank and at most "
            f"{MAX_DEGREE} (nearest: {nearest})"
        )
    if arguments.max_tokens < 1:
        raise ConfigError("--max-tokens 0 is not legal; at least 1 token is compared (nearest: 1)")
    path = resolve_model_path(config.model)
    model = load_model_config(path, config.hf_overrides, config.model_impl)
    trials = create_trials(
        config.parallel,
        block_size=config.cache.block_size,
        model=model,
        world_size=arguments.world,
        every_strategy=arguments.all,
    )
    sweeps = arguments.all or not is_explicit(config.parallel)
    config = replace(config, model=str(path), executor=_executor(config, sweeps=sweeps))
    if arguments.task is not None:
        return _run_task(arguments.task, config, model, trials, output)

    from heddle.verify.certify import certify  # imports torch
    from heddle.verify.prompts import shipped_text
    from heddle.verify.report import certificate_document

    certificate = certify(
        config,
        model,
        trials,
        num_tokens=arguments.max_tokens,
        text=shipped_text(),
        report=output.say,
    )
    document = certificate_document(certificate)
    if output.as_json:
        output.document(document)
    else:
        output.table(_table(document))
        if document["one_rank_error"] is not None:
            output.text(_narrow_error(document))
        output.text(_verdict(document))
    return 0 if certificate.ok else 1


def _run_task(
    task: Task, config: EngineConfig, model: ModelConfig, trials: Sequence[Trial], output: Output
) -> int:
    """Ask the task of one rank and of every layout, and print; exit 1 when a layout differs."""
    from heddle.verify.prompts import shipped_text
    from heddle.verify.task_runs import run_task, task_document  # imports torch

    report = run_task(task, config, model, trials, text=shipped_text(), report=output.say)
    document = task_document(report)
    if output.as_json:
        output.document(document)
    else:
        output.table(_layouts_table(_task_title(document), document["layouts"], TASK_COLUMNS[task]))
        output.text(_task_verdict(document))
    return 0 if report.ok else 1


def _task_title(document: dict[str, Any]) -> str:
    asked = f"prompts of up to {document['num_tokens']} tokens, all answers equal"
    if document["tolerance"] is not None:
        asked = f"{document['num_tokens']} tokens; relative tolerance {document['tolerance']:.1e}"
    count = f"{document['num_prompts']} " if document["num_prompts"] > 1 else ""
    return (
        f"{document['task']}, {document['dtype']}, {document['kv_cache_dtype']} cache, "
        f"{count}{asked}"
    )


def _task_verdict(document: dict[str, Any]) -> str:
    """One line; the first layout that differs where there is one."""
    _, *layouts = document["layouts"]
    wrong = [layout for layout in layouts if not layout["ok"]]
    if not wrong:
        return f"ok: {len(layouts)} layouts do as one rank does"
    return f"failed: {len(wrong)} of {len(layouts)} layouts; first {degrees_text(wrong[0])}"


def _executor(config: EngineConfig, *, sweeps: bool) -> Any:
    """Threads for sweeps, since nothing has to be started for each layout; else what resolves."""
    return "threads" if sweeps and config.executor == "auto" else config.executor


def _table(document: dict[str, Any]) -> Table:
    lengths = ", ".join(map(str, document["prompt_lens"]))
    title = (
        f"{document['dtype']}, {document['num_tokens']} tokens after prompts of {lengths}; "
        f"tolerance {document['tolerance']:.1e}"
    )
    return _layouts_table(title, document["layouts"], COLUMNS)


def _layouts_table(title: str, layouts: Sequence[dict[str, Any]], told: Sequence[str]) -> Table:
    outer = [axis for axis in OUTER_DEGREES if any(row[axis] > 1 for row in layouts)]
    columns = (*DEGREES, *outer, *told)
    rows = [[_cell(layout[column], column) for column in columns] for layout in layouts]
    return Table(title=title, columns=columns, rows=rows)


def _cell(value: Any, column: str) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.1e}" if "diff" in column else f"{value:.6g}"


def _narrow_error(document: dict[str, Any]) -> str:
    """What the narrow type costs, whatever the layout."""
    error = document["one_rank_error"]
    return (
        f"one rank, {document['dtype']}, {document['kv_cache_dtype']} cache, against "
        f"float32: largest logit difference {error['max_abs']:.1e}, rms {error['rms']:.1e}, "
        f"{error['other_tokens']} of {error['num_steps']} tokens differ"
    )


def _verdict(document: dict[str, Any]) -> str:
    """One line; the first wrong token where there is one."""
    wrong = [layout for layout in document["layouts"] if not layout["ok"]]
    if not wrong:
        return f"ok: {len(document['layouts'])} layouts equal one rank"
    first = wrong[0]
    place = first["first_difference"]
    detail = "logits beyond the tolerance"
    if place is not None:
        detail = (
            f"prompt {place['prompt']} step {place['step']}: token {place['token_id']}, "
            f"golden {place['golden_token_id']}"
        )
    count = f"{len(wrong)} of {len(document['layouts'])} layouts"
    return f"failed: {count}; first {degrees_text(first)}: {detail}"
