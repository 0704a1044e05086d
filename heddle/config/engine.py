"""The whole configuration of an engine, and what it became once resolved."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from heddle.config.adapters import AdapterConfig
from heddle.config.cache import CacheConfig
from heddle.config.faults import FaultRule
from heddle.config.link_costs import LinkCosts
from heddle.config.model import ModelConfig
from heddle.config.overrides import overrides_text
from heddle.config.parallel import ParallelConfig
from heddle.config.scheduler import SchedulerConfig
from heddle.config.speculative import SpeculativeConfig
from heddle.errors import ConfigError

ExecutorName = Literal["auto", "inline", "threads", "processes", "ray", "torchrun"]
ModelImpl = Literal["auto", "native", "transformers"]
CpuCommBackend = Literal["auto", "shm", "gloo"]
KernelChoice = Literal["auto", "torch", "numba"]
QuantizationChoice = Literal["none", "int8", "keep"]
MAX_TIMEOUT_SECONDS = 1_000_000
"""Above eleven days a limit is none, and waits of the operating system overflow."""
MAX_THREADS = 1024
"""OpenMP runtimes crash when they cannot start what was asked for, instead of saying so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the user asked for."""

    model: str
    """`demo`, a folder, a `.gguf` file or a hub id."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    dtype: str = "auto"
    """Compute dtype; auto is float32 on a CPU, the checkpoint's on a GPU."""
    executor: ExecutorName = "auto"
    """Where ranks live: in the caller, in threads of it, in processes of this host (also called
    `mp`), or in processes on the nodes of a Ray cluster.
    """
    cpu_comm_backend: CpuCommBackend = "auto"
    """What carries tensors between rank processes: memory that they share, or gloo's sockets; auto
    is shared memory where all ranks are processes of this host.
    """
    backend: str = "auto"
    """Attention backend: `numba`, `torch`, `reference`, or `auto`, which follows the kernels;
    `flashinfer` and `flash_attn` need CUDA.
    """
    kernels: KernelChoice = "auto"
    """Who computes: functions of torch, or loops compiled by numba, which take float32 on a CPU;
    auto is numba where it can serve.
    """
    deterministic: bool = False
    """Give the same bits in every run with as many threads: compiled kernels wherever there are
    some, whose sums have a fixed order, and no choice that hangs on what was measured here.
    """
    enforce_eager: bool = False
    """Compute every step in Python, layer by layer; else compiled kernels of a step that looks like
    an earlier one are launched again together.
    """
    cuda_graphs: bool = False
    """Let a CUDA device capture decode steps, padded to a few row counts, and launch each as one;
    other steps are computed as with enforce_eager. Refused where ranks do not compute on CUDA,
    which no rank does yet.
    """
    quantization: QuantizationChoice = "none"
    """How matrices of products lie in memory: in the compute dtype, in 8 bits with a scale per 64
    inputs, or as a GGUF file packs them (Q4_0, Q4_1, Q4_K, Q8_0); the latter two need compiled
    kernels.
    """
    max_model_len: int | None = None
    """Window; None: the model's."""
    hf_overrides: str = ""
    """Values in place of those of the model's config.json, as a JSON object; nested objects are
    merged, null takes a value away.
    """
    model_impl: ModelImpl = "auto"
    """Whose layers run: those built here, or those of the transformers library with our attention;
    auto is native where the architecture is known here.
    """
    speculative: SpeculativeConfig | None = None
    """Guess tokens and check several per step, as a JSON object; None is off."""
    link_costs: LinkCosts | None = None
    """Prices of calls, bytes and arithmetic; None: what `heddle doctor` measured here, or defaults.
    """
    seed: int = 0
    """Seed from which requests without their own get theirs."""
    num_threads: int | None = None
    """Threads of one rank; None: cores / ranks on the host, at least 1."""
    step_timeout_seconds: float = 300.0
    """Seconds after which a step counts as hung."""
    startup_timeout_seconds: float = 600.0
    """Seconds in which all ranks must be ready."""
    group_timeout_seconds: float = 60.0
    """Seconds in which groups of ranks must form."""
    verify_every: int = 0
    """Steps after which the numbers of a running request are held against those of one rank, which
    a helper process with weights of its own computes; 0: never. Needs float32 or float64.
    """
    debug_kv: bool = False
    """Note beside each stored row whose it is, and look before it is read; freed blocks are filled
    with NaN. Slow; for tests.
    """
    trace_file: str | None = None
    """File that is to say what each rank did when, and why it exchanged what: JSON for Perfetto or
    `chrome://tracing`, and for `heddle view`.
    """
    trace_steps: int = 256
    """Steps that the trace holds, from the first one on; 0: all."""
    weights_manifest: str | None = None
    """File with the sizes and sha256 sums of the model's files, which are summed up and compared;
    None: `heddle-manifest.json` beside them, where there is one.
    """
    max_restarts: int = 5
    """Times in ten minutes that failed ranks are started anew, while open requests wait and then go
    on; 0: a failure of ranks ends the engine. Ranks of `ray` and of a launcher are not started
    anew.
    """

    enable_fault_injection: bool = False
    """Let `faults` happen; for tests of a whole engine, never where anybody is served."""
    faults: tuple[FaultRule, ...] = ()
    """Faults on purpose, as `action(target,phase,step)` separated by `;`, for example
    `kill(1,decode,3)`.
    """

    def __post_init__(self) -> None:
        """Check what needs neither the model nor the machine.

        Raises:
            ConfigError: a value of another type, a time limit that no clock can keep, or more
                threads than runtimes survive.
        """
        for name in ("seed", "num_threads", "max_model_len"):
            value = getattr(self, name)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if not is_whole and (value is not None or name == "seed"):
                raise ConfigError(f"{name}={value!r} is not legal; it is a whole number")
        for name in ("verify_every", "max_restarts", "trace_steps"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ConfigError(
                    f"{name}={value!r} is not legal; it is a whole number, at least 0 (nearest: 0)"
                )
        for name in ("step_timeout_seconds", "startup_timeout_seconds", "group_timeout_seconds"):
            seconds = getattr(self, name)
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
                raise ConfigError(f"{name}={seconds!r} is not legal; it is a number")
            if not (math.isfinite(seconds) and 0 < seconds <= MAX_TIMEOUT_SECONDS):
                nearest = MAX_TIMEOUT_SECONDS if seconds > 0 else 1
                raise ConfigError(
                    f"{name}={seconds:g} is not legal; it is above 0 and at most "
                    f"{MAX_TIMEOUT_SECONDS} seconds (nearest: {nearest})"
                )
        if (text := overrides_text(self.hf_overrides)) != self.hf_overrides:
            raise ConfigError(
                f"hf_overrides={self.hf_overrides!r} is not legal; it is JSON with sorted keys "
                f"(nearest: {text!r})"
            )
        for name, kind in (("speculative", SpeculativeConfig), ("link_costs", LinkCosts)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ConfigError(
                    f"{name}={value!r} is not legal; it is a {kind.__name__}, or None (nearest: "
                    "None)"
                )
        if self.faults and not self.enable_fault_injection:
            raise ConfigError(
                f"faults={'; '.join(map(str, self.faults))} is not legal without "
                "enable_fault_injection=True; faults on purpose are for tests (nearest: no faults)"
            )
        if self.deterministic and self.scheduler.target_itl_ms is not None:
            raise ConfigError(
                f"target_itl={self.scheduler.target_itl_ms:g} is not legal with deterministic=True,"
                " for it cuts prompts by measured times (nearest: None)"
            )
        if self.num_threads is not None and self.num_threads > MAX_THREADS:
            raise ConfigError(
                f"num_threads={self.num_threads} is not legal; it is at most {MAX_THREADS} "
                f"(nearest: {MAX_THREADS})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """What will run: every `auto` replaced. Plain data, so that it can be sent to rank
    processes.
    """

    model_path: str
    """Folder or `.gguf` file on this machine."""
    model: ModelConfig
    parallel: ParallelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    dtype: str
    kv_cache_dtype: str
    executor: str
    cpu_comm_backend: Literal["", "shm", "gloo"] = ""
    """What connects rank processes; empty where ranks are no processes."""
    backend: str
    num_blocks: int
    """Virtual blocks of the pool, block 0 included."""
    kernels: Literal["torch", "numba"] = "torch"
    enforce_eager: bool = False
    cuda_graphs: bool = False
    quantization: QuantizationChoice = "none"
    num_state_slots: int = 0
    """Slots for recurrent states in each replica, slot 0 included; 0 without recurrent layers."""
    num_threads: int
    context_workspace_tokens: int
    seed: int
    step_timeout_seconds: float
    startup_timeout_seconds: float
    group_timeout_seconds: float
    verify_every: int = 0
    debug_kv: bool = False
    trace_file: str | None = None
    trace_steps: int = 256
    weights_manifest: str | None = None
    epoch: int = 0
    """Life of the ranks: how often they were started anew."""
    speculative: SpeculativeConfig | None = None
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    link_costs: LinkCosts = field(default_factory=LinkCosts)
    """Constants that choices weigh; frozen at start-up, so that all ranks choose alike."""
    hf_overrides: str = ""
    """What `model` was read with."""
    enable_fault_injection: bool = False
    faults: tuple[FaultRule, ...] = ()
    """What is to go wrong on purpose; each rank finds its own rules among them."""
    reasons: tuple[str, ...] = ()
    """What was chosen for each `auto`, and why."""
