"""`heddle plan`: which layout for a model, devices and requests, why, and why not the others.

Nothing is loaded and nothing is started: shapes come from a configuration, rates from a sheet, and
legality, memory and messages from the code that the engine itself uses.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heddle.cli.flags import ENGINE_FLAGS, add_layout_flags, command_parser, layout_config
from heddle.cli.output import Output
from heddle.cli.parser import CommandParser
from heddle.cli.summaries import SUMMARIES
from heddle.cli.values import integer, number, size
from heddle.errors import ModelFileError

if TYPE_CHECKING:
    from heddle.config import ModelConfig
    from heddle.planner.devices import Sheet
    from heddle.planner.search import Found
    from heddle.planner.settings import Settings
    from heddle.planner.trace import TraceSummary
    from heddle.planner.workload import Workload

SUMMARY = SUMMARIES["plan"]
ENGINE_FIELDS = (
    "max_model_len",
    "kv_cache_memory_bytes",
    "max_num_batched_tokens",
    "max_num_seqs",
    "hf_overrides",
)
"""Settings of an engine that a plan depends on beside its layout."""
_CHUNKS = {"cpu": 512}
_CHUNK = 2048
_PROMPT, _OUTPUT, _CONCURRENCY = 8192, 256, 8


def create_parser(environment: Mapping[str, str], output: Output) -> CommandParser:
    """Model, devices, requests, and what is fixed of the layout."""
    parser = command_parser("plan", SUMMARY, environment, output)
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="demo, a folder, a .gguf file, a config.json, or a name such as deepseek-v3",
    )
    for name, options in _FLAGS.items():
        parser.declare("plan", name, **options)
    for flag in ENGINE_FLAGS:
        if flag.field in ENGINE_FIELDS:
            flag.declare(parser, "plan")
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
        "default": 1,
        "metavar": "N",
        "help": "how many there are; of a processor: cores, of which a rank may take several",
    },
    "--prompt-len": {
        "type": size,
        "metavar": "TOKENS",
        "help": f"of a prompt; {_PROMPT} unless there is a trace, or what the window has room for",
    },
    "--output-len": {
        "type": size,
        "metavar": "TOKENS",
        "help": f"of an answer; {_OUTPUT} unless there is a trace",
    },
    "--concurrency": {
        "type": integer,
        "default": _CONCURRENCY,
        "metavar": "N",
        "help": "requests that are served at once",
    },
    "--prefix-hit": {
        "type": number,
        "metavar": "SHARE",
        "help": "of each prompt that the prefix cache has, below 1; of a trace unless given",
    },
    "--trace": {
        "metavar": "FILE",
        "help": "lengths of requests: Mooncake JSONL, Azure CSV, or prompt_len and output_len",
    },
    "--ttft": {
        "type": number,
        "metavar": "SECONDS",
        "help": "seconds to the first token, to be kept",
    },
    "--tpot": {"type": number, "metavar": "SECONDS", "help": "seconds between tokens, to be kept"},
}


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Search, and print what was found; no layout at all is exit 1."""
    from heddle.cli.plan_tables import print_plan
    from heddle.planner.document import describe
    from heddle.planner.search import DEGREES, Search

    settings, load, trace = question(arguments)
    origins = arguments.parser.origins
    base = layout_config(arguments)
    fixed = frozenset(name for name in DEGREES if name in origins)
    found = Search(settings, load, base, fixed).run()
    document = describe(settings, load, found, trace)
    if output.as_json:
        output.document(document)
    else:
        print_plan(document, output)
    if not found.candidates:
        output.say(_none_fits(found))
    return 0 if found.candidates else 1


def _none_fits(found: Found) -> str:
    """How many layouts there are, and why not even the lightest fits."""
    from heddle.planner.search import degree_flags

    heavy = [entry for entry in found.refused if entry.needed_bytes is not None]
    if not found.refused:
        return "refused: no layout with these degrees has as many ranks as there are devices"
    if not heavy:
        return f"refused: none of {len(found.refused)} layouts is legal"
    lightest = min(heavy, key=lambda entry: entry.needed_bytes or 0)
    return (
        f"refused: none of {len(found.refused)} layouts fits; the lightest, "
        f"{degree_flags(lightest.parallel)}: {lightest.reasons[0]}"
    )


def question(
    arguments: argparse.Namespace,
) -> tuple[Settings, Workload, list[Any]]:
    """What was asked, resolved."""
    sheet = find_sheet(arguments.device, arguments.device_file)
    model, path = find_model(arguments.model, arguments.hf_overrides)
    window = arguments.max_model_len or model.max_position_embeddings
    load, trace = workload(arguments, window)
    settings = settings_of(arguments, sheet, model, path, num_seqs=load.concurrency)
    return settings, load, trace


def settings_of(
    arguments: argparse.Namespace, sheet: Sheet, model: ModelConfig, path: str, num_seqs: int = 0
) -> Settings:
    """What all layouts of a question have in common.

    Args:
        arguments: with the flags of `ENGINE_FIELDS`, and the number of devices.
        sheet: of the devices.
        model: its shape.
        path: its place on this machine; empty: of the catalogue.
        num_seqs: that are to run at once, unless a flag says how many may.
    """
    from heddle.config import CacheConfig, SchedulerConfig
    from heddle.planner.settings import Settings

    scheduler = SchedulerConfig(
        max_num_batched_tokens=_given(
            arguments, "max_num_batched_tokens", _CHUNKS.get(sheet.kind, _CHUNK)
        ),
        max_num_seqs=_given(
            arguments, "max_num_seqs", max(SchedulerConfig().max_num_seqs, num_seqs)
        ),
    )
    cache = CacheConfig(
        block_size=arguments.block_size,
        kv_cache_dtype=arguments.kv_cache_dtype,
        kv_cache_memory_bytes=arguments.kv_cache_memory_bytes,
    )
    return Settings(
        model=model,
        model_name=arguments.model,
        model_path=path,
        sheet=sheet,
        num_devices=arguments.devices,
        dtype=_dtype(arguments.dtype, model, sheet),
        cache=cache,
        scheduler=scheduler,
        max_model_len=arguments.max_model_len,
        chunk_per_pcp_rank="max_num_batched_tokens" not in arguments.parser.origins,
    )


def find_sheet(device: str, override: str | None) -> Sheet:
    """The sheet of a device, with some of its figures replaced.

    Raises:
        ConfigError: there is no such sheet, or a file is none.
    """
    from heddle.planner.devices import load_sheet, replace_figures

    sheet = load_sheet(device)
    return sheet if override is None else replace_figures(sheet, Path(override).expanduser())


def find_model(name: str, overrides: str = "") -> tuple[ModelConfig, str]:
    """The shape of a model, and its place on this machine; empty: of the catalogue.

    Args:
        name: `demo`, a folder, a `.gguf` file, a JSON file, or a name of the catalogue.
        overrides: of values of its `config.json`.
    Raises:
        ModelFileError: there is no such model; names the nearest of the catalogue.
        UnsupportedError: the model cannot be run.
    """
    from heddle.models.config_json import load_model_config
    from heddle.models.sources import DEMO, resolve_model_path
    from heddle.planner.catalogue import catalogue_folder, catalogue_hint

    path = Path(name).expanduser()
    if path.suffix == ".json" and path.is_file():
        return _read_json(path, overrides), str(path)
    folder = catalogue_folder(name)
    if folder is not None and not path.exists():
        return load_model_config(folder, overrides), ""
    if name != DEMO and not path.exists():
        raise ModelFileError(
            f"model={name!r} is not found; plan reads {DEMO}, a folder, a .gguf file, a "
            f"config.json or a name of its catalogue{catalogue_hint(name)}, and fetches nothing "
            "from a hub"
        )
    local = str(resolve_model_path(name))
    return load_model_config(local, overrides), local


def _read_json(path: Path, overrides: str) -> ModelConfig:
    """A configuration under any name; readers look for `config.json` in a folder."""
    from heddle.models.config_json import load_model_config

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "config.json"
        try:
            json.loads(path.read_text(encoding="utf-8"))
            copy.write_bytes(path.read_bytes())
        except (OSError, RecursionError, ValueError) as error:
            raise ModelFileError(f"{path}: it is not JSON that can be read ({error})") from error
        return load_model_config(folder, overrides)


def workload(arguments: argparse.Namespace, window: int) -> tuple[Workload, list[Any]]:
    """The requests, and the trace that they stand for; empty without one."""
    from heddle.planner.trace import read_trace, summarise
    from heddle.planner.workload import Workload

    requests = read_trace(Path(arguments.trace).expanduser()) if arguments.trace else []
    summary: TraceSummary | None = summarise(requests) if requests else None
    output_len, prompt_len = arguments.output_len, arguments.prompt_len
    if output_len is None:
        output_len = summary.mean_output if summary else _OUTPUT
    if prompt_len is None:
        default = min(_PROMPT, max(window - output_len, 1))
        prompt_len = summary.mean_prompt if summary else default
    share = arguments.prefix_hit
    if share is None:
        share = summary.repeated_share if summary else 0.0
    load = Workload(
        prompt_len=prompt_len,
        output_len=output_len,
        concurrency=arguments.concurrency,
        cached_share=share,
        ttft=arguments.ttft,
        tpot=arguments.tpot,
    )
    return load, requests


def _given(arguments: argparse.Namespace, name: str, default: int) -> int:
    """The value of a flag whose default depends on the device."""
    value: int = getattr(arguments, name)
    return value if name in arguments.parser.origins else default


def _dtype(asked: str, model: ModelConfig, sheet: Sheet) -> str:
    """As asked; else the checkpoint's on accelerators, and float32 on processors."""
    if asked != "auto":
        return asked
    if sheet.kind != "cpu" and model.checkpoint_dtype in sheet.flops:
        return model.checkpoint_dtype
    return sheet.dtype
