"""Every flag that sets a config field, declared once for all commands.

A row names the field; default, help text and legal words come from there. `engine_config` reads the
rows backwards.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from heddle.cli.fieldtext import field_texts
from heddle.cli.output import Output
from heddle.cli.parser import CommandParser
from heddle.cli.values import (
    count_or_auto,
    integer,
    json_object,
    number,
    overrides,
    size,
    size_or_auto,
)
from heddle.config import AdapterConfig, CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from heddle.config.engine import CpuCommBackend, KernelChoice, ModelImpl, QuantizationChoice
from heddle.config.parallel import CommBackend, ContextExchange, RowSharding
from heddle.config.scheduler import SchedulingPolicy
from heddle.engine.args import executor_name

UserExecutor = Literal["auto", "inline", "threads", "processes", "ray"]
"""Executors a user may name; a launcher's ranks are found, not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag and the config field it sets.

    Attributes:
        names: spellings; the first long one is also the variable.
        config: class of the field.
        field: its name.
        convert: word -> value.
        choices: legal words; empty: any.
        action: of argparse, for a flag without a value.
        takes_several: all words up to the next flag belong to it.
    """

    names: tuple[str, ...]
    config: type
    field: str
    convert: Callable[[str], Any] = str
    choices: tuple[str, ...] = ()
    action: str | type[argparse.Action] | None = None
    takes_several: bool = False

    @property
    def variable(self) -> str:
        """Name in the parsed namespace, as argparse derives it."""
        long = next(name for name in self.names if name.startswith("--"))
        return long.lstrip("-").replace("-", "_")

    @property
    def default(self) -> object:
        """Of the field."""
        fields = {field.name: field for field in dataclasses.fields(self.config)}
        return fields[self.field].default

    def declare(self, parser: CommandParser, section: str) -> None:
        """Add this flag to a parser."""
        options: dict[str, Any] = {
            "default": self.default,
            "help": field_texts(self.config)[self.field].replace("%", "%%"),
        }
        if self.action is not None:
            options |= {"action": self.action}
        else:
            options |= {"type": self.convert}
            options |= {"choices": self.choices} if self.choices else {"metavar": "VALUE"}
            options |= {"nargs": "+"} if self.takes_several else {}
        parser.declare(section, *self.names, **options)


def _degree(short: str, long: str) -> Flag:
    return Flag(
        names=(f"-{short}", f"--{long}"),
        config=ParallelConfig,
        field=long.replace("-", "_"),
        convert=integer,
    )


LAYOUT_FLAGS: tuple[Flag, ...] = (
    _degree("tp", "tensor-parallel-size"),
    _degree("pcp", "prefill-context-parallel-size"),
    _degree("dcp", "decode-context-parallel-size"),
    _degree("pp", "pipeline-parallel-size"),
    _degree("dp", "data-parallel-size"),
    Flag(
        names=("--cp-kv-cache-interleave-size", "--dcp-kv-cache-interleave-size"),
        config=ParallelConfig,
        field="kv_interleave_size",
        convert=integer,
    ),
    Flag(names=("--block-size",), config=CacheConfig, field="block_size", convert=integer),
    Flag(
        names=("--dcp-comm-backend",),
        config=ParallelConfig,
        field="dcp_comm_backend",
        choices=typing.get_args(CommBackend),
    ),
    Flag(
        names=("--cp-context-exchange",),
        config=ParallelConfig,
        field="cp_context_exchange",
        choices=typing.get_args(ContextExchange),
    ),
    Flag(
        names=("--dcp-q-replicate",),
        config=ParallelConfig,
        field="dcp_q_replicate",
        action=argparse.BooleanOptionalAction,
    ),
    Flag(
        names=("--enable-expert-parallel",),
        config=ParallelConfig,
        field="enable_expert_parallel",
        action=argparse.BooleanOptionalAction,
    ),
    Flag(
        names=("--cp-start-rank-rotation",),
        config=ParallelConfig,
        field="cp_start_rank_rotation",
        action=argparse.BooleanOptionalAction,
    ),
    Flag(names=("--cp-lanes",), config=ParallelConfig, field="cp_lanes", convert=count_or_auto),
    Flag(
        names=("--decode-row-sharding",),
        config=ParallelConfig,
        field="decode_row_sharding",
        choices=typing.get_args(RowSharding),
    ),
    Flag(
        names=("--executor", "--distributed-executor-backend"),
        config=EngineConfig,
        field="executor",
        convert=executor_name,
        choices=typing.get_args(UserExecutor),
    ),
    Flag(
        names=("--dtype",),
        config=EngineConfig,
        field="dtype",
    ),
    Flag(names=("--kv-cache-dtype",), config=CacheConfig, field="kv_cache_dtype"),
)

ENGINE_FLAGS: tuple[Flag, ...] = (
    Flag(
        names=("--cpu-comm-backend",),
        config=EngineConfig,
        field="cpu_comm_backend",
        choices=typing.get_args(CpuCommBackend),
    ),
    Flag(
        names=("--max-model-len",), config=EngineConfig, field="max_model_len", convert=size_or_auto
    ),
    Flag(
        names=("--kv-cache-memory-bytes",),
        config=CacheConfig,
        field="kv_cache_memory_bytes",
        convert=size,
    ),
    Flag(
        names=("--num-gpu-blocks-override",),
        config=CacheConfig,
        field="num_blocks_override",
        convert=integer,
    ),
    Flag(
        names=("--enable-prefix-caching",),
        config=CacheConfig,
        field="enable_prefix_caching",
        action=argparse.BooleanOptionalAction,
    ),
    Flag(names=("--max-num-seqs",), config=SchedulerConfig, field="max_num_seqs", convert=size),
    Flag(
        names=("--max-num-batched-tokens",),
        config=SchedulerConfig,
        field="max_num_batched_tokens",
        convert=size,
    ),
    Flag(
        names=("--max-num-partial-prefills",),
        config=SchedulerConfig,
        field="max_num_partial_prefills",
        convert=integer,
    ),
    Flag(
        names=("--long-prefill-token-threshold",),
        config=SchedulerConfig,
        field="long_prefill_token_threshold",
        convert=size,
    ),
    Flag(
        names=("--scheduling-policy",),
        config=SchedulerConfig,
        field="policy",
        choices=typing.get_args(SchedulingPolicy),
    ),
    Flag(names=("--target-itl",), config=SchedulerConfig, field="target_itl_ms", convert=number),
    Flag(
        names=("--max-num-queued-reqs",),
        config=SchedulerConfig,
        field="max_num_queued_reqs",
        convert=size,
    ),
    Flag(
        names=("--max-num-queued-tokens",),
        config=SchedulerConfig,
        field="max_num_queued_tokens",
        convert=size_or_auto,
    ),
    Flag(
        names=("--max-pinned-tokens",),
        config=CacheConfig,
        field="max_pinned_tokens",
        convert=size,
    ),
    Flag(
        names=("--context-workspace-tokens",),
        config=ParallelConfig,
        field="context_workspace_tokens",
        convert=size,
    ),
    Flag(
        names=("--hf-overrides",),
        config=EngineConfig,
        field="hf_overrides",
        convert=overrides,
    ),
    Flag(
        names=("--model-impl",),
        config=EngineConfig,
        field="model_impl",
        choices=typing.get_args(ModelImpl),
    ),
    Flag(
        names=("--speculative-config",),
        config=EngineConfig,
        field="speculative",
        convert=json_object,
    ),
    Flag(
        names=("--enable-lora",),
        config=AdapterConfig,
        field="enable_lora",
        action=argparse.BooleanOptionalAction,
    ),
    Flag(names=("--lora-modules",), config=AdapterConfig, field="lora_modules", takes_several=True),
    Flag(names=("--max-loras",), config=AdapterConfig, field="max_loras", convert=integer),
    Flag(names=("--max-lora-rank",), config=AdapterConfig, field="max_lora_rank", convert=integer),
    Flag(names=("--lora-dir",), config=AdapterConfig, field="lora_dir"),
    Flag(names=("--attention-backend",), config=EngineConfig, field="backend"),
    Flag(
        names=("--kernels",),
        config=EngineConfig,
        field="kernels",
        choices=typing.get_args(KernelChoice),
    ),
    Flag(
        names=("--quantization",),
        config=EngineConfig,
        field="quantization",
        choices=typing.get_args(QuantizationChoice),
    ),
    Flag(
        names=("--deterministic",),
        config=EngineConfig,
        field="deterministic",
        action=argparse.BooleanOptionalAction,
    ),
    Flag(
        names=("--enforce-eager",),
        config=EngineConfig,
        field="enforce_eager",
        action=argparse.BooleanOptionalAction,
    ),
    Flag(
        names=("--cuda-graphs",),
        config=EngineConfig,
        field="cuda_graphs",
        action=argparse.BooleanOptionalAction,
    ),
    Flag(names=("--num-threads",), config=EngineConfig, field="num_threads", convert=integer),
    Flag(
        names=("--seed",),
        config=EngineConfig,
        field="seed",
        convert=integer,
    ),
    Flag(
        names=("--step-timeout",),
        config=EngineConfig,
        field="step_timeout_seconds",
        convert=number,
    ),
    Flag(
        names=("--startup-timeout",),
        config=EngineConfig,
        field="startup_timeout_seconds",
        convert=number,
    ),
    Flag(
        names=("--cpu-distributed-timeout-seconds",),
        config=EngineConfig,
        field="group_timeout_seconds",
        convert=number,
    ),
    Flag(
        names=("--verify-every",),
        config=EngineConfig,
        field="verify_every",
        convert=integer,
    ),
    Flag(
        names=("--debug-kv",),
        config=EngineConfig,
        field="debug_kv",
        action=argparse.BooleanOptionalAction,
    ),
    Flag(names=("--trace-file",), config=EngineConfig, field="trace_file"),
    Flag(
        names=("--trace-steps",),
        config=EngineConfig,
        field="trace_steps",
        convert=integer,
    ),
    Flag(names=("--weights-manifest",), config=EngineConfig, field="weights_manifest"),
    Flag(
        names=("--max-restarts",),
        config=EngineConfig,
        field="max_restarts",
        convert=integer,
    ),
    Flag(
        names=("--enable-fault-injection",),
        config=EngineConfig,
        field="enable_fault_injection",
        action=argparse.BooleanOptionalAction,
    ),
    Flag(names=("--faults",), config=EngineConfig, field="faults"),
)


def command_parser(
    command: str, summary: str, environment: Mapping[str, str], output: Output
) -> CommandParser:
    """A parser with the flags that every command has."""

    def warn(line: str) -> None:
        output.say(f"warning: {line}")

    parser = CommandParser(command, summary, environment, warn)
    parser.declare(
        "output", "--json", action="store_true", help="print one JSON document on stdout"
    )
    parser.declare("output", "--debug", action="store_true", help="show a traceback with an error")
    return parser


def add_layout_flags(parser: CommandParser) -> None:
    """The flags that say how ranks are arranged; every command has them."""
    for flag in LAYOUT_FLAGS:
        flag.declare(parser, "layout")


def add_engine_flags(parser: CommandParser) -> None:
    """The flags of an engine that runs a model."""
    for flag in ENGINE_FLAGS:
        flag.declare(parser, "engine")


def layout_config(arguments: argparse.Namespace) -> ParallelConfig:
    """Degrees and exchanges of a command line that has the layout flags only."""
    return ParallelConfig(
        **{
            flag.field: getattr(arguments, flag.variable)
            for flag in LAYOUT_FLAGS
            if flag.config is ParallelConfig
        }
    )


def engine_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every engine setting of a command line, by the name of its flag with underscores."""
    return {
        flag.variable: getattr(arguments, flag.variable) for flag in LAYOUT_FLAGS + ENGINE_FLAGS
    }
