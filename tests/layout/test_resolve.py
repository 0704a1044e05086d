"""Every `auto` becomes a value, with its reason."""

from __future__ import annotations

import re
from typing import Any

import pytest

from heddle.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    ResolvedConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from heddle.config.model import LayerKind
from heddle.config.visibility import Visibility
from heddle.errors import ConfigError, TopologyError
from heddle.layout.cache_rows import QUANTIZED
from heddle.layout.resolve import resolve
from tests.support.layouts import degrees
from tests.support.models import model_config

GIB = 2**30


def resolved(model: ModelConfig | None = None, **settings: Any) -> ResolvedConfig:
    return resolve(
        EngineConfig(model="m", **settings),
        model or model_config(),
        free_memory_bytes=8 * GIB,
        num_cores=8,
        model_path="/models/m",
    )


def test_defaults_of_one_rank() -> None:
    found = resolved()
    assert (found.dtype, found.kv_cache_dtype) == ("float32", "float32")
    assert (found.executor, found.backend, found.num_threads) == ("inline", "numba", 8)
    assert found.scheduler.max_model_len == 8192
    assert found.context_workspace_tokens == 4 * 512
    assert found.num_blocks == 2 * GIB // (16 * 46_080)
    assert found.model_path == "/models/m"


def test_each_choice_has_a_reason() -> None:
    subjects = [reason.split(":")[0] for reason in resolved().reasons]
    assert sorted(subjects) == [
        "KV pool",
        "backend",
        "context_workspace_tokens",
        "dtype",
        "executor",
        "kernels",
        "kv_cache_dtype",
        "num_threads",
    ]


def test_what_was_asked_is_kept_and_has_no_reason() -> None:
    found = resolved(
        dtype="float64",
        executor="threads",
        backend="reference",
        kernels="torch",
        num_threads=3,
        max_model_len=100,
        seed=5,
        cache=CacheConfig(kv_cache_dtype="bfloat16", num_blocks_override=7),
        parallel=degrees(2, 1, 2, context_workspace_tokens=64),
        step_timeout_seconds=1.0,
    )
    assert (found.dtype, found.kv_cache_dtype) == ("float64", "bfloat16")
    assert (found.executor, found.backend, found.num_threads) == ("threads", "reference", 3)
    assert (found.scheduler.max_model_len, found.num_blocks, found.seed) == (100, 7, 5)
    assert (found.context_workspace_tokens, found.step_timeout_seconds) == (64, 1.0)
    assert [reason.split(":")[0] for reason in found.reasons] == ["KV pool"]


def over(
    asked: str, executor: str, refusal: str | None, size: int = 2
) -> tuple[str, tuple[str, ...]]:
    """The link that is chosen between ranks, and what is said about it."""
    config = EngineConfig(
        model="m",
        parallel=degrees(size, 1, 1),
        executor=executor,  # type: ignore[arg-type]
        cpu_comm_backend=asked,  # type: ignore[arg-type]
    )
    found = resolve(
        config,
        model_config(),
        free_memory_bytes=8 * GIB,
        num_cores=8,
        shared_memory_refusal=refusal,
        model_path="",
    )
    said = [reason for reason in found.reasons if reason.startswith("cpu_comm_backend")]
    return found.cpu_comm_backend, tuple(said)


def test_processes_share_memory_unless_it_is_refused() -> None:
    here = ("cpu_comm_backend: shm, since all ranks live on this host",)
    assert over("auto", "auto", None) == over("auto", "processes", None) == ("shm", here)
    assert over("auto", "auto", "no room") == ("gloo", ("cpu_comm_backend: gloo, since no room",))
    launched = "cpu_comm_backend: gloo, since launched ranks may live on several hosts"
    assert over("auto", "torchrun", None) == ("gloo", (launched,))
    for asked, executor in (("shm", "processes"), ("gloo", "processes"), ("gloo", "torchrun")):
        assert over(asked, executor, None) == (asked, ())
    assert over("gloo", "processes", "no room") == ("gloo", ())
    for executor, size in (("threads", 2), ("inline", 1), ("auto", 1)):
        assert over("auto", executor, None, size) == ("", ())


@pytest.mark.parametrize(
    ("asked", "executor", "refusal", "words"),
    [
        ("shm", "processes", "no room", "cpu_comm_backend=shm .* no room .nearest: cpu.*=gloo"),
        ("shm", "torchrun", None, "cpu_comm_backend=shm .* several hosts .nearest: .*=gloo"),
        ("shm", "threads", None, "with executor=threads; it connects .*nearest: auto"),
        ("gloo", "threads", None, "cpu_comm_backend=gloo is not legal with executor=threads"),
        ("mpi", "processes", None, "cpu_comm_backend=mpi is not legal; legal here: auto, shm, gl"),
    ],
)
def test_a_link_that_cannot_serve_is_refused(
    asked: str, executor: str, refusal: str | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        over(asked, executor, refusal)


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_cache_can_be_narrower_than_any_compute_dtype(name: str) -> None:
    found = resolved(cache=CacheConfig(kv_cache_dtype=name, num_blocks_override=7))
    assert (found.dtype, found.kv_cache_dtype) == ("float32", name)
    with pytest.raises(ConfigError, match=f"dtype={name} is not legal"):
        resolved(dtype=name)


def test_the_cache_follows_the_compute_dtype() -> None:
    assert resolved(dtype="bfloat16").kv_cache_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("parallel", "executor", "threads"),
    [
        (degrees(1, 1, 1), "inline", 8),
        (degrees(2, 1, 2), "processes", 4),
        (degrees(3, 1, 1), "processes", 2),
        (degrees(4, 4, 16), "processes", 1),
    ],
)
def test_executor_and_threads_follow_the_world(parallel: Any, executor: str, threads: int) -> None:
    found = resolved(parallel=parallel)
    assert (found.executor, found.num_threads) == (executor, threads)


def test_thread_ranks_take_one_thread_each() -> None:
    assert resolved(parallel=degrees(2, 1, 1), executor="threads").num_threads == 1


def test_ranks_on_other_hosts_leave_more_to_each() -> None:
    config = EngineConfig(model="m", parallel=degrees(4, 1, 1), executor="torchrun")
    machine = {"free_memory_bytes": 8 * GIB, "num_cores": 8, "model_path": "/models/m"}
    alone = resolve(config, model_config(), **machine)  # type: ignore[arg-type]
    spread = resolve(config, model_config(), ranks_on_host=2, **machine)  # type: ignore[arg-type]
    assert (alone.num_threads, spread.num_threads) == (2, 4)
    # 4 ranks share 2 GiB, or 2 do; the largest slice stores 2 kv heads
    block_bytes = 16 * 30 * 2 * 128 * 4
    assert (alone.num_blocks, spread.num_blocks) == (GIB // 2 // block_bytes, GIB // block_bytes)


def test_the_workspace_holds_a_round_even_for_tiny_chunks() -> None:
    found = resolved(
        parallel=degrees(4, 1, 4, kv_interleave_size=16),
        scheduler=SchedulerConfig(max_num_batched_tokens=8),
    )
    assert found.context_workspace_tokens == 64


def test_a_window_beyond_the_models_is_refused() -> None:
    assert resolved(max_model_len=8192).scheduler.max_model_len == 8192
    with pytest.raises(ConfigError, match=r"max_model_len=8193 .* 1 to 8192 .*nearest: 8192"):
        resolved(max_model_len=8193)
    with pytest.raises(ConfigError, match=r"max_model_len=0 .*nearest: 1\)"):
        resolved(max_model_len=0)


def test_a_refused_layout_carries_reasons_and_neighbours() -> None:
    with pytest.raises(TopologyError, match="decode_context_parallel_size=3") as caught:
        resolved(parallel=degrees(4, 1, 3))
    assert "9 query heads and 3 kv heads" in caught.value.reasons[0]
    assert "-tp 4 -pcp 1 -dcp 4" in caught.value.nearest


def test_a_sliding_window_bounds_layers_and_not_the_context() -> None:
    kinds = (LayerKind(visibility=Visibility("window", 512)),) * 30
    assert resolved(model_config(layer_kinds=kinds)).scheduler.max_model_len == 8192


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int8"}, r"dtype=int8 is not legal; legal here: auto, float32, float64"),
        ({"cache": CacheConfig(kv_cache_dtype="fp8")}, "kv_cache_dtype=fp8 .* fp8_e4m3, int8"),
        ({"executor": "inline", "parallel": degrees(2, 1, 1)}, "executor=inline .* 2 ranks"),
        ({"executor": "moon"}, "executor=moon is not legal"),
        ({"backend": "flash"}, "attention_backend=flash is not legal"),
        ({"num_threads": 0}, r"num_threads=0 is not legal; it is at least 1 \(nearest: 1\)"),
        ({"scheduler": SchedulerConfig(max_num_seqs=0)}, "max_num_seqs=0 is not legal"),
        (
            {"scheduler": SchedulerConfig(long_prefill_token_threshold=-1)},
            r"long_prefill_token_threshold=-1 .* at least 0",
        ),
    ],
)
def test_other_settings_are_refused_in_words(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(**settings)


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens"])
@pytest.mark.parametrize("value", ["8", 8.0, True, None])
def test_limit_that_is_no_whole_number_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name}={value!r} is not legal; it is a whole number"):
        resolved(scheduler=SchedulerConfig(**{name: value}))


@pytest.mark.parametrize("value", [2.0, "2", True])
def test_pool_that_is_no_whole_number_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"num_gpu_blocks_override={value!r} is not legal"):
        resolved(cache=CacheConfig(num_blocks_override=value))


@pytest.mark.parametrize("sizes", [("2", 1), ("2", "2"), (None, 1), (1.0, 1)])
def test_size_that_is_no_whole_number_is_refused_by_name(sizes: tuple[Any, Any]) -> None:
    tp, pcp = sizes
    with pytest.raises(TopologyError, match=rf"tensor_parallel_size={tp!r} is not legal"):
        resolved(
            parallel=ParallelConfig(tensor_parallel_size=tp, prefill_context_parallel_size=pcp)
        )


@pytest.mark.parametrize("sizes", [(1, 10**9, 1), (10**9, 1, 1)], ids=str)
def test_a_degree_that_nobody_can_start_is_refused_at_once(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(TopologyError, match=r"_size=1000000000 is not legal; .*at most 4096"):
        resolved(parallel=degrees(*sizes))


@pytest.mark.parametrize("name", ["data_parallel_size", "pipeline_parallel_size"])
def test_a_degree_of_replicas_or_stages_has_the_same_bound(name: str) -> None:
    with pytest.raises(TopologyError, match=rf"{name}=4097 is not legal; .*at most 4096"):
        resolved(parallel=degrees(1, 1, 1, **{name: 4097}))


def test_the_degrees_together_are_bounded_and_the_suggestion_works() -> None:
    with pytest.raises(TopologyError, match=r"data_parallel_size=4096 .* 196,608 ranks") as caught:
        resolved(parallel=degrees(4, 12, 1, data_parallel_size=4096))
    found = re.search(r"\(nearest: (\d+)\)", str(caught.value))
    assert found is not None
    assert int(found[1]) == 1365
    few = CacheConfig(num_blocks_override=2)
    resolved(parallel=degrees(4, 12, 1, data_parallel_size=1365), cache=few)


def test_a_step_has_room_for_all_drafts_of_a_sequence() -> None:
    drafts = SpeculativeConfig(num_speculative_tokens=7)
    assert resolved().speculative is None
    eight = SchedulerConfig(max_num_batched_tokens=8)
    assert resolved(speculative=drafts, scheduler=eight).speculative is drafts
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=7 .*=7;.*\(nearest: 6\)"):
        resolved(speculative=drafts, scheduler=SchedulerConfig(max_num_batched_tokens=7))
    with pytest.raises(ConfigError, match=r"\(nearest: no drafts\)"):
        resolved(speculative=drafts, scheduler=SchedulerConfig(max_num_batched_tokens=1))


def test_kernels_follow_the_dtype_and_the_backend_follows_the_kernels() -> None:
    found = {
        dtype: (result.kernels, result.backend)
        for dtype in ("float32", "float64", "bfloat16")
        for result in [resolved(dtype=dtype)]
    }
    assert found == {
        "float32": ("numba", "numba"),
        "float64": ("torch", "torch"),
        "bfloat16": ("torch", "torch"),
    }
    with pytest.raises(ConfigError, match=r"kernels=numba is not legal.*float64.*kernels=torch"):
        resolved(dtype="float64", kernels="numba")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kernels": "torch"}, "deterministic=True is not legal with kernels=torch"),
        ({"dtype": "float64"}, r"compiled kernels compute in float32, not in float64"),
        ({"backend": "torch"}, "attention_backend=torch fixes no order of sums"),
    ],
)
def test_a_deterministic_engine_takes_compiled_kernels_alone(
    settings: dict[str, Any], message: str
) -> None:
    assert resolved(deterministic=True).kernels == "numba"
    with pytest.raises(ConfigError, match=message):
        resolved(deterministic=True, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization": "keep"}, r"quantization=keep is not legal with .*nearest: int8, none"),
        (
            {"quantization": "int8", "kernels": "torch"},
            r"quantization=int8 is not legal with kernels=torch.*nearest: none",
        ),
    ],
)
def test_packed_weights_need_a_file_of_them_and_compiled_kernels(
    settings: dict[str, Any], message: str
) -> None:
    assert resolved().quantization == "none"
    asked = resolved(quantization="int8")
    assert asked.quantization == "int8"
    assert any(reason.startswith("quantization: int8;") for reason in asked.reasons)
    with pytest.raises(ConfigError, match=message):
        resolved(**settings)


def test_graphs_are_refused_where_no_device_captures_them() -> None:
    def found(**settings: Any) -> ResolvedConfig:
        return resolve(
            EngineConfig(model="m", **settings),
            model_config(),
            free_memory_bytes=8 * GIB,
            num_cores=8,
            cuda_graphs_refusal="ranks compute on cpu (CUDA devices found: 0)",
            model_path="/models/m",
        )

    with pytest.raises(
        ConfigError,
        match=r"cuda_graphs=True is not legal here: ranks compute on cpu .* "
        r"legal here: False \(nearest: cuda_graphs=False\)",
    ):
        found(cuda_graphs=True)
    assert not found(cuda_graphs=False).cuda_graphs


def test_graphs_are_asked_for_alone() -> None:
    assert resolved(cuda_graphs=True).cuda_graphs
    with pytest.raises(ConfigError, match=r"cuda_graphs=True is not legal with enforce_eager=True"):
        resolved(cuda_graphs=True, enforce_eager=True)
