"""From what was asked to what will run: every `auto` replaced, each choice with its reason.

Pure: the caller measures the machine and passes plain numbers. Legality is asked of
`heddle.layout.rules`, once, here.
"""

from __future__ import annotations

import typing
from dataclasses import replace
from typing import Literal

from heddle.config import (
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    ResolvedConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from heddle.config.engine import QuantizationChoice
from heddle.config.faults import check_faults
from heddle.config.link_costs import LinkCosts
from heddle.errors import ConfigError, TopologyError, counted
from heddle.layout import rules
from heddle.layout.cache_rows import CACHE_DTYPES, DTYPE_BYTES
from heddle.layout.pool import (
    PoolRequest,
    pool_blocks,
    pool_state_slots,
    state_slot_bytes,
)
from heddle.layout.rule import is_count

_EXECUTORS = ("inline", "threads", "processes", "ray", "torchrun")
_BACKENDS = ("torch", "reference", "numba", "flashinfer", "flash_attn")
_CPU_COMM_BACKENDS = ("shm", "gloo")
_KERNELS = ("torch", "numba")
_WORKSPACE_CHUNKS = 4
MAX_DEGREE = 4096
"""Far above any machine; each rank is a process with a copy of its weights."""
MAX_RANKS = 1 << 16
"""Of all degrees together."""
_DEGREES = (
    "data_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "tensor_parallel_size",
)
"""Those that multiply the ranks, the freest first."""


def resolve(
    config: EngineConfig,
    model: ModelConfig,
    *,
    free_memory_bytes: int,
    num_cores: int,
    ranks_on_host: int | None = None,
    has_numba: bool = True,
    shared_memory_refusal: str | None = None,
    cuda_graphs_refusal: str | None = None,
    model_path: str,
) -> ResolvedConfig:
    """Replace every `auto` by a value.

    Args:
        config: what the user asked for.
        model: shapes of the checkpoint.
        free_memory_bytes: free memory of the host with the least.
        num_cores: cores of that host.
        ranks_on_host: ranks that share it; None: all of them.
        has_numba: kernels can be compiled there.
        shared_memory_refusal: why rank processes there cannot share memory; None: they can.
        cuda_graphs_refusal: why ranks cannot capture steps; None: they can, or nobody asks it.
        model_path: folder or file of the checkpoint on this machine.
    Raises:
        TopologyError: the layout is not legal; carries all reasons and the nearest legal layouts.
        ConfigError: another setting is not legal.
    """
    reasons: list[str] = []
    _check_degrees(config.parallel)
    config.adapters.check_use()
    window = _window(config, model)
    rules.check(
        config.parallel,
        block_size=config.cache.block_size,
        model=model,
        max_model_len=config.max_model_len,
    )
    if model.foreign is not None and config.adapters.enable_lora:
        raise ConfigError(
            "enable_lora is not legal with a model whose layers the transformers library runs; "
            "only families built here take adapters (nearest: no enable_lora)"
        )
    scheduler = replace(config.scheduler, max_model_len=window)
    _check_scheduler(scheduler)
    _check_speculative(config.speculative, scheduler)
    ranks = config.parallel.world_size if ranks_on_host is None else ranks_on_host
    dtype = _dtype(config, reasons)
    executor = _executor(config, reasons)
    check_faults(config.faults, executor, config.parallel.world_size)
    request = PoolRequest(
        cache=config.cache,
        parallel=config.parallel,
        model=model,
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=window,
        kv_dtype=_kv_dtype(config, dtype, reasons),
        free_memory_bytes=free_memory_bytes,
        ranks_on_host=ranks,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        state_slot_bytes=state_slot_bytes(model, config.parallel, dtype),
        states_per_sequence=1 + _num_drafts(config.speculative),
    )
    num_blocks, why = pool_blocks(request)
    reasons.append(why)
    return ResolvedConfig(
        model_path=model_path,
        model=model,
        parallel=config.parallel,
        cache=config.cache,
        scheduler=scheduler,
        dtype=dtype,
        kv_cache_dtype=request.kv_dtype,
        executor=executor,
        cpu_comm_backend=_cpu_comm_backend(config, executor, shared_memory_refusal, reasons),
        kernels=(kernels := _kernels(config, dtype, has_numba, reasons)),
        enforce_eager=config.enforce_eager,
        cuda_graphs=_cuda_graphs(config, cuda_graphs_refusal),
        quantization=_quantization(config, kernels, model_path, reasons),
        backend=_backend(config, kernels, reasons),
        num_blocks=num_blocks,
        num_state_slots=pool_state_slots(request),
        num_threads=_threads(config, executor, num_cores, ranks, reasons),
        context_workspace_tokens=_workspace(config.parallel, scheduler, reasons),
        seed=config.seed,
        step_timeout_seconds=config.step_timeout_seconds,
        startup_timeout_seconds=config.startup_timeout_seconds,
        group_timeout_seconds=config.group_timeout_seconds,
        verify_every=_verify_every(config, dtype, request.kv_dtype),
        debug_kv=config.debug_kv,
        trace_file=config.trace_file,
        trace_steps=config.trace_steps,
        weights_manifest=config.weights_manifest,
        speculative=config.speculative,
        adapters=config.adapters,
        hf_overrides=config.hf_overrides,
        link_costs=config.link_costs or LinkCosts(),
        enable_fault_injection=config.enable_fault_injection,
        faults=config.faults,
        reasons=tuple(reasons),
    )


def _cuda_graphs(config: EngineConfig, refusal: str | None) -> bool:
    if config.cuda_graphs and config.enforce_eager:
        raise ConfigError(
            "cuda_graphs=True is not legal with enforce_eager=True; a step is captured or computed "
            "layer by layer; legal here: either of them alone (nearest: cuda_graphs=False)"
        )
    if config.cuda_graphs and refusal is not None:
        raise ConfigError(
            f"cuda_graphs=True is not legal here: {refusal}; a graph is captured of what ranks "
            "launch on a CUDA device; legal here: False (nearest: cuda_graphs=False)"
        )
    return config.cuda_graphs


def _verify_every(config: EngineConfig, dtype: str, kv_dtype: str) -> int:
    """How far layouts may differ by rounding is known of wide types alone."""
    if config.verify_every and config.parallel.world_size == 1:
        raise ConfigError(
            f"verify_every={config.verify_every} is not legal with one rank, which has nothing to "
            "differ from; legal here: 0 (nearest: 0)"
        )
    if config.verify_every and not (dtype == kv_dtype and dtype in ("float32", "float64")):
        raise ConfigError(
            f"verify_every={config.verify_every} is not legal with {dtype} and a {kv_dtype} cache, "
            "whose rounding has no bound of its own; legal here: 0 (nearest: 0); `heddle verify` "
            "compares such layouts"
        )
    return config.verify_every


def _window(config: EngineConfig, model: ModelConfig) -> int:
    longest = model.max_position_embeddings
    asked = config.max_model_len
    if asked is None:
        return longest
    if not 1 <= asked <= longest:
        nearest = min(max(asked, 1), longest)
        raise ConfigError(
            f"max_model_len={asked} is not legal; this model was made for windows of 1 to "
            f"{longest} tokens (nearest: {nearest})"
        )
    return asked


def _check_degrees(parallel: ParallelConfig) -> None:
    """Refuse what nobody can start, before any rule counts that far."""
    sizes = [getattr(parallel, name) for name in _DEGREES]
    for name, size in zip(_DEGREES, sizes, strict=True):
        if isinstance(size, int) and size > MAX_DEGREE:
            raise TopologyError(
                [
                    f"{name}={size} is not legal; each degree multiplies the ranks, and is at most "
                    f"{MAX_DEGREE} (nearest: {MAX_DEGREE})"
                ]
            )
    if is_count(*sizes) and parallel.world_size > MAX_RANKS:
        largest = max(_DEGREES, key=lambda name: getattr(parallel, name))
        size = getattr(parallel, largest)
        fitting = MAX_RANKS * size // parallel.world_size
        raise TopologyError(
            [
                f"{largest}={size} is not legal with {parallel.world_size:,} ranks in all; the "
                f"degrees together make at most {MAX_RANKS:,} (nearest: {max(fitting, 1)})"
            ]
        )


def _check_scheduler(scheduler: SchedulerConfig) -> None:
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_num_partial_prefills"):
        _check_count(name, getattr(scheduler, name), smallest=1)
    _check_count("long_prefill_token_threshold", scheduler.long_prefill_token_threshold, smallest=0)


def _num_drafts(speculative: SpeculativeConfig | None) -> int:
    return speculative.num_speculative_tokens if speculative else 0


def _check_speculative(speculative: SpeculativeConfig | None, scheduler: SchedulerConfig) -> None:
    """A step must have room for one sequence with all its drafts."""
    if speculative is None:
        return
    most = scheduler.max_num_batched_tokens - 1
    if speculative.num_speculative_tokens > most:
        nearest = f"nearest: {most}" if most else "nearest: no drafts"
        raise ConfigError(
            f"num_speculative_tokens={speculative.num_speculative_tokens} is not legal with "
            f"max_num_batched_tokens={most + 1}; a sequence takes one row and one per draft "
            f"({nearest})"
        )


def _check_count(name: str, value: int, smallest: int) -> None:
    if type(value) is not int:
        raise ConfigError(f"{name}={value!r} is not legal; it is a whole number")
    if value < smallest:
        raise ConfigError(
            f"{name}={value} is not legal; it is at least {smallest} (nearest: {smallest})"
        )


def _named(name: str, value: str, legal: tuple[str, ...]) -> str:
    """The value, once known to be one of the legal names."""
    if value not in legal:
        raise ConfigError(f"{name}={value} is not legal; legal here: auto, {', '.join(legal)}")
    return value


def _dtype(config: EngineConfig, reasons: list[str]) -> str:
    if config.dtype != "auto":
        return _named("dtype", config.dtype, tuple(DTYPE_BYTES))
    reasons.append("dtype: float32, since CPUs multiply 16-bit numbers slowly")
    return "float32"


def _kv_dtype(config: EngineConfig, dtype: str, reasons: list[str]) -> str:
    asked = config.cache.kv_cache_dtype
    if asked != "auto":
        return _named("kv_cache_dtype", asked, CACHE_DTYPES)
    reasons.append(f"kv_cache_dtype: {dtype}, the compute dtype")
    return dtype


def _executor(config: EngineConfig, reasons: list[str]) -> str:
    world_size = config.parallel.world_size
    if config.executor == "inline" and world_size > 1:
        raise ConfigError(
            f"executor=inline is not legal with {world_size} ranks; it runs one rank in the "
            f"caller's thread; legal here: auto, threads, processes, ray, torchrun (nearest: auto)"
        )
    if config.executor != "auto":
        return _named("executor", config.executor, _EXECUTORS)
    name = "inline" if world_size == 1 else "processes"
    reasons.append(f"executor: {name}, for {world_size} rank{'s' if world_size > 1 else ''}")
    return name


def _cpu_comm_backend(
    config: EngineConfig, executor: str, refusal: str | None, reasons: list[str]
) -> Literal["", "shm", "gloo"]:
    asked = config.cpu_comm_backend
    if asked != "auto":
        _named("cpu_comm_backend", asked, _CPU_COMM_BACKENDS)
    if executor not in ("processes", "ray", "torchrun"):
        if asked != "auto":
            raise ConfigError(
                f"cpu_comm_backend={asked} is not legal with executor={executor}; it connects rank "
                "processes (nearest: auto)"
            )
        return ""
    if executor == "torchrun":
        refusal = "launched ranks may live on several hosts"
    if asked == "shm" and refusal is not None:
        raise ConfigError(
            f"cpu_comm_backend=shm is not legal here: {refusal} (nearest: cpu_comm_backend=gloo)"
        )
    if asked == "auto":
        chosen, why = ("gloo", refusal) if refusal else ("shm", "all ranks live on this host")
        reasons.append(f"cpu_comm_backend: {chosen}, since {why}")
    return "gloo" if refusal or asked == "gloo" else "shm"


def _backend(config: EngineConfig, kernels: str, reasons: list[str]) -> str:
    if config.backend != "auto":
        return _named("attention_backend", config.backend, _BACKENDS)
    reasons.append(f"backend: {kernels}, as the kernels")
    return kernels


def _kernels(
    config: EngineConfig, dtype: str, has_numba: bool, reasons: list[str]
) -> Literal["torch", "numba"]:
    if config.kernels != "auto" and _named("kernels", config.kernels, _KERNELS) == "torch":
        if config.deterministic:
            raise ConfigError(
                "deterministic=True is not legal with kernels=torch, whose products fix no order "
                "of sums (nearest: kernels=numba)"
            )
        return "torch"
    lacks = []
    if dtype != "float32":
        lacks.append(f"compiled kernels compute in float32, not in {dtype}")
    if not has_numba:
        lacks.append("numba is not installed")
    if config.deterministic and (lacks or config.backend not in ("auto", "numba")):
        raise ConfigError(
            "deterministic=True is not legal here: "
            f"{' and '.join(lacks) or f'attention_backend={config.backend} fixes no order of sums'}"
            " (nearest: deterministic=False)"
        )
    if config.kernels == "numba" and lacks:
        raise ConfigError(
            f"kernels=numba is not legal; {' and '.join(lacks)} (nearest: kernels=torch)"
        )
    if config.kernels == "auto":
        name = "torch" if lacks else "numba"
        why = " and ".join(lacks) if lacks else "compiled loops for float32 on a CPU"
        reasons.append(f"kernels: {name}, {'since ' if lacks else ''}{why}")
    return "torch" if lacks else "numba"


def _quantization(
    config: EngineConfig, kernels: str, model_path: str, reasons: list[str]
) -> QuantizationChoice:
    asked = config.quantization
    if asked not in (legal := typing.get_args(QuantizationChoice)):
        raise ConfigError(f"quantization={asked} is not legal; legal here: {', '.join(legal)}")
    if asked != "none" and kernels != "numba":
        raise ConfigError(
            f"quantization={asked} is not legal with kernels={kernels}; packed weights are "
            "multiplied by compiled kernels, in float32 (nearest: none)"
        )
    if asked == "keep" and not model_path.endswith(".gguf"):
        raise ConfigError(
            f"quantization=keep is not legal with {model_path}; numbers are kept of GGUF files "
            "(nearest: int8, none)"
        )
    if asked != "none":
        reasons.append(
            f"quantization: {asked}; matrices that groups of inputs do not fit, and those of "
            "routed experts, stay float32"
        )
    return asked


def _threads(
    config: EngineConfig, executor: str, num_cores: int, ranks_on_host: int, reasons: list[str]
) -> int:
    if config.num_threads is not None:
        _check_count("num_threads", config.num_threads, smallest=1)
        return config.num_threads
    if executor == "threads":
        reasons.append("num_threads: 1, since ranks are threads of one process")
        return 1
    threads = max(1, num_cores // ranks_on_host)
    reasons.append(
        f"num_threads: {threads}, from {counted(num_cores, 'core')} for "
        f"{counted(ranks_on_host, 'rank')}"
    )
    return threads


def _workspace(parallel: ParallelConfig, scheduler: SchedulerConfig, reasons: list[str]) -> int:
    if parallel.context_workspace_tokens is not None:
        return parallel.context_workspace_tokens
    # A piece of context is at least one round of ownership, even where chunks are tiny.
    round_size = parallel.decode_context_parallel_size * parallel.kv_interleave_size
    tokens = max(_WORKSPACE_CHUNKS * scheduler.max_num_batched_tokens, round_size)
    reasons.append(
        f"context_workspace_tokens: {tokens}, from {_WORKSPACE_CHUNKS} chunks of "
        f"{scheduler.max_num_batched_tokens} rows"
    )
    return tokens
