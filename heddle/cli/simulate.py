"""`heddle simulate`: a trace of requests on a layout of devices that nobody has to own.

The engine's own scheduler and block accounting serve the trace; what a step takes is asked of the
planner's model of cost. Nothing is loaded and nothing is started.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from heddle.cli import plan
from heddle.cli.flags import ENGINE_FLAGS, add_layout_flags, command_parser, layout_config
from heddle.cli.output import Output
from heddle.cli.parser import CommandParser
from heddle.cli.summaries import SUMMARIES
from heddle.cli.values import integer, number, size
from heddle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from heddle.planner.memory import PlannedEngine
    from heddle.planner.search import Candidate
    from heddle.planner.settings import Settings
    from heddle.planner.trace import TracedRequest

_Value = TypeVar("_Value")

SUMMARY = SUMMARIES["simulate"]
ENGINE_FIELDS = (
    *plan.ENGINE_FIELDS,
    "enable_prefix_caching",
    "max_num_partial_prefills",
    "long_prefill_token_threshold",
    "target_itl_ms",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
)
"""Settings of an engine that a simulation depends on beside its layout."""
_PROMPT, _OUTPUT, _REQUESTS, _RATE = 4096, 256, 1000, 1.0
_FEW = 10_000
"""Requests up to which bounds are made unasked: they cost two more simulations."""
_CONCURRENCY = 64
"""Requests at once by which a plan ranks the layouts that are looked at."""


def create_parser(environment: Mapping[str, str], output: Output) -> CommandParser:
    """Model, devices, requests, what is promised, and the layout."""
    parser = command_parser("simulate", SUMMARY, environment, output)
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="demo, a folder, a .gguf file, a config.json, or a name such as deepseek-v3",
    )
    for name, options in _FLAGS.items():
        parser.declare("simulate", name, **options)
    for flag in ENGINE_FLAGS:
        if flag.field in ENGINE_FIELDS:
            flag.declare(parser, "simulate")
    add_layout_flags(parser)
    return parser


_FLAGS: dict[str, dict[str, Any]] = {
    "--device": {
        "default": "CPU",
        "metavar": "NAME",
        "help": "sheet of the devices, such as H200, in any case; or a file of that form",
    },
    "--device-file": {
        "metavar": "FILE",
        "help": "figures that replace those of the sheet, as a JSON object of the same form",
    },
    "--devices": {
        "type": integer,
        "metavar": "N",
        "help": "how many there are; as many as the layout has ranks, unless given",
    },
    "--trace": {
        "metavar": "FILE",
        "help": "requests: Mooncake JSONL, Azure CSV, or JSON, JSONL, CSV of lengths",
    },
    "--synthetic": {
        "metavar": "KIND",
        "help": "requests that are made up: poisson, bursts, chat, agent",
    },
    "--requests": {
        "type": integer,
        "metavar": "N",
        "help": f"how many: the first of a trace, all unless given; {_REQUESTS} that are made up",
    },
    "--rate": {
        "type": number,
        "metavar": "PER-SECOND",
        "help": "requests a second: times of a trace are stretched to it; "
        f"{_RATE:g} of requests that are made up",
    },
    "--prompt-len": {
        "type": size,
        "metavar": "TOKENS",
        "help": f"of a prompt that is made up, on average; {_PROMPT} unless given",
    },
    "--output-len": {
        "type": size,
        "metavar": "TOKENS",
        "help": f"of an answer that is made up, on average; {_OUTPUT} unless given",
    },
    "--seed": {
        "type": integer,
        "default": 0,
        "metavar": "N",
        "help": "of requests that are made up",
    },
    "--ttft": {"type": number, "metavar": "SECONDS", "help": "to the first token, to be kept"},
    "--tpot": {"type": number, "metavar": "SECONDS", "help": "between tokens, to be kept"},
    "--sweep": {
        "action": "store_true",
        "help": "simulate the most promising layouts of the devices, and print the best of them",
    },
    "--bounds": {
        "action": argparse.BooleanOptionalAction,
        "help": "simulate with both ends of the sheet's ranges too; "
        f"on up to {_FEW:,} requests, unless there is a sweep",
    },
}


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Simulate, and print what was found; a trace of which nothing could be served is exit 1."""
    from heddle.cli.simulate_tables import print_simulation
    from heddle.simulator.document import describe, serve_flags
    from heddle.simulator.outcome import Job, Targets
    from heddle.simulator.sweep import bounds_of, choose, edges, entries, run_jobs

    targets = Targets(ttft=arguments.ttft, tpot=arguments.tpot)
    requests, source, has_times = requests_of(arguments)
    settings = settings_of(arguments)
    candidates, notes = layouts(arguments, settings, requests)
    if not has_times:
        notes.append(
            "the trace has no times: all requests are there at once, and none is turned away; "
            "--rate spreads them"
        )
    chosen = choose(candidates) if arguments.sweep else candidates[:1]
    jobs = [
        Job(
            settings=settings,
            parallel=each.parallel,
            requests=requests,
            targets=targets,
            has_door=has_times,
        )
        for each in chosen
    ]
    wants_bounds = arguments.bounds
    if wants_bounds is None:
        wants_bounds = not arguments.sweep and len(requests) <= _FEW
    sweep, bounds, place = [], None, 0
    if arguments.sweep:
        answers = run_jobs(jobs)
        sweep = entries(chosen, answers)
        best = sweep[0]["flags"]
        place = next(at for at, each in enumerate(chosen) if serve_flags(each.engine) == best)
        ends = run_jobs(edges(jobs[place])) if wants_bounds else []
    else:
        answers = run_jobs([*jobs, *(edges(jobs[0]) if wants_bounds else [])])
        ends = answers[1:]
    if ends:
        bounds = bounds_of(ends[0], ends[1], answers[place])
    document = describe(
        chosen[place].engine,
        requests,
        source,
        answers[place],
        bounds=bounds,
        sweep=sweep,
        notes=notes,
    )
    if output.as_json:
        output.document(document)
    else:
        print_simulation(document, output)
    return 0 if document["finished"] else 1


def requests_of(arguments: argparse.Namespace) -> tuple[list[TracedRequest], str, bool]:
    """(requests by arrival, where they are from, whether they arrive at times of their own).

    Raises:
        ConfigError: neither or both kinds were asked for, or a setting of one without it.
    """
    from heddle.planner.trace import read_trace
    from heddle.simulator.arrivals import Synthetic, made_up, timed

    trace, kind = arguments.trace, arguments.synthetic
    if (trace is None) == (kind is None):
        given = "both were given" if trace else "neither was given"
        raise ConfigError(
            f"{given}; requests come from one of --trace FILE and --synthetic KIND, legal kinds: "
            "poisson, bursts, chat, agent"
        )
    if trace is not None:
        for name in ("prompt_len", "output_len"):
            if getattr(arguments, name) is not None:
                raise ConfigError(
                    f"{name}={getattr(arguments, name)} has no effect on a trace, which has its "
                    "own lengths; leave it out, or use --synthetic"
                )
        found = read_trace(Path(trace).expanduser())
        has_times = arguments.rate is not None or found[0].arrival is not None
        ready = timed(found, count=arguments.requests, rate=arguments.rate)
        return ready, Path(trace).name, has_times
    wanted = Synthetic(
        kind=kind,
        requests=_or(arguments.requests, _REQUESTS),
        rate=_or(arguments.rate, _RATE),
        prompt_len=_or(arguments.prompt_len, _PROMPT),
        output_len=_or(arguments.output_len, _OUTPUT),
        seed=arguments.seed,
    )
    return made_up(wanted), f"{kind}, made up", True


def settings_of(arguments: argparse.Namespace) -> Settings:
    """What all layouts have in common."""
    from dataclasses import replace

    sheet = plan.find_sheet(arguments.device, arguments.device_file)
    model, path = plan.find_model(arguments.model, arguments.hf_overrides)
    if arguments.devices is None:
        arguments.devices = layout_config(arguments).world_size
    found = plan.settings_of(arguments, sheet, model, path)
    scheduler = replace(
        found.scheduler,
        max_num_partial_prefills=arguments.max_num_partial_prefills,
        long_prefill_token_threshold=arguments.long_prefill_token_threshold,
        target_itl_ms=arguments.target_itl,
        max_num_queued_reqs=arguments.max_num_queued_reqs,
        max_num_queued_tokens=arguments.max_num_queued_tokens,
    )
    cache = replace(found.cache, enable_prefix_caching=arguments.enable_prefix_caching)
    return replace(found, scheduler=scheduler, cache=cache)


def layouts(
    arguments: argparse.Namespace, settings: Settings, requests: Sequence[TracedRequest]
) -> tuple[list[Candidate], list[str]]:
    """Those that may be simulated, the first one first; and what was decided for the caller.

    Raises:
        TopologyError, ConfigError: the layout that was given is not legal or does not fit, or no
            layout of the devices fits.
    """
    from heddle.planner.memory import plan_engine
    from heddle.planner.search import DEGREES, Candidate, Search, degree_flags
    from heddle.planner.trace import summarise
    from heddle.planner.workload import Workload

    base = layout_config(arguments)
    fixed = frozenset(name for name in DEGREES if name in arguments.parser.origins)
    if base.world_size > settings.num_devices:
        raise ConfigError(
            f"devices={settings.num_devices} is not legal with a layout of {base.world_size} "
            f"ranks; it is at least the number of ranks (nearest: {base.world_size})"
        )
    if not arguments.sweep and (fixed or settings.num_devices == 1):
        engine: PlannedEngine = plan_engine(settings, base)
        return [Candidate(engine=engine, prediction=None)], []
    summary = summarise(requests)
    load = Workload(
        prompt_len=summary.mean_prompt, output_len=summary.mean_output, concurrency=_CONCURRENCY
    )
    found = Search(settings, load, base, fixed).run()
    serving = [each for each in found.candidates if each.prediction is not None]
    if not serving:
        raise ConfigError(
            f"devices={settings.num_devices}: no layout fits that serves the mean request of "
            f"{load.num_tokens:,} tokens; heddle plan says why of each"
        )
    notes = []
    if not arguments.sweep:
        flags = degree_flags(serving[0].parallel)
        notes.append(f"no degrees were given: {flags} is the layout that heddle plan ranks first")
    return serving, notes


def _or(value: _Value | None, default: _Value) -> _Value:
    return default if value is None else value
