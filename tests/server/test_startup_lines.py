"""What a server says when it is ready."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import heddle
from heddle.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from heddle.engine.executors.launch_info import LaunchInfo
from heddle.server.config import ServerConfig
from heddle.server.startup_lines import (
    changed_settings,
    closing_lines,
    exposure_warnings,
    opening_lines,
    plan_lines,
)
from tests.support.fake_executor import resolved_config

MIB = 1 << 20


def lines(**changes: Any) -> list[str]:
    parallel = ParallelConfig(prefill_context_parallel_size=2, decode_context_parallel_size=2)
    return opening_lines(
        EngineConfig(model="demo", parallel=parallel),
        ServerConfig(port=9000, api_key=("secret-1", "secret-2")),
        resolved_config(parallel=parallel, **changes),
        {0: {"weights": 3 * MIB, "kv_pool": MIB, "states": 0}, 1: {"weights": MIB}},
    )


def test_what_will_run_comes_in_its_order() -> None:
    assert lines() == [
        f"heddle {heddle.__version__}, model demo (LlamaForCausalLM)",
        "settings: prefill_context_parallel_size=2, decode_context_parallel_size=2, port=9000, "
        "api_key=(2 hidden)",
        "plan: TP 1, PCP 2, DCP 2, PP 1, DP 1; 2 ranks, executor inline, backend torch, kernels "
        "torch, dtype float32, KV float32",
        "pcp groups: [0, 1]",
        "dcp groups: [0, 1]",
        "memory of rank 0, MiB: weights 3.0, kv_pool 1.0, predicted 4.0",
        "memory of rank 1, MiB: weights 1.0, predicted 1.0",
        "KV cache size: 512 tokens",
        "Maximum concurrency for 256 tokens per request: 2.00x",
        "longest prompt: 255 tokens",
        "prefix cache: blocks of 8 tokens",
    ]


def test_where_it_serves_comes_last() -> None:
    assert closing_lines([50 * MIB, 49 * MIB], ["/health", "/v1/models"], "http://a:1") == [
        "memory measured, MiB, with interpreter and libraries: rank 0 50.0, rank 1 49.0",
        "routes: /health /v1/models",
        "ready at http://a:1",
    ]
    assert closing_lines([], ["/health"], "http://a:1")[0] == "routes: /health"


def test_every_socket_is_listed_where_they_are_known() -> None:
    told = closing_lines([], ["/health"], "http://a:1", ["127.0.0.1:1 (7)", "[::1]:2 (8)"])
    assert told[0] == "all listening sockets: 127.0.0.1:1 (7), [::1]:2 (8)"


def warnings(
    settings: dict[str, Any],
    address: str | None = None,
    executor: str = "processes",
    comm: str = "shm",
) -> list[str]:
    launch = LaunchInfo(rank=0, world_size=2, local_world_size=1, master_address=address)
    plan = replace(resolved_config(), executor=executor, cpu_comm_backend=comm)
    return exposure_warnings(ServerConfig(**settings), plan, launch if address else None)


def test_what_is_on_loopback_needs_no_warning() -> None:
    for settings in ({}, {"host": "::1"}, {"host": "localhost"}, {"uds": "x"}):
        for address in (None, "127.0.0.1", "localhost", "::1"):
            assert warnings(settings, address, comm="gloo") == []
    assert warnings({}, executor="ray") == []


def test_what_others_could_do_is_said() -> None:
    (clear,) = warnings({"host": "0.0.0.0", "api_key": ("k",)})
    assert "keys and prompts travel in the clear" in clear
    everybody, _ = warnings({"host": "0.0.0.0", "allow_insecure_bind": True})
    assert "everybody who reaches this port may use it" in everybody
    tls = {"host": "0.0.0.0", "api_key": ("k",), "ssl_certfile": "c", "ssl_keyfile": "k"}
    assert warnings(tls) == []
    for found in (
        warnings({}, "10.0.0.1"),
        warnings({}, "host0"),
        warnings({}, executor="ray", comm="gloo"),
    ):
        (line,) = found
        assert "neither authenticates nor encrypts" in line
        assert "private network" in line


def test_one_rank_is_no_ranks() -> None:
    alone = opening_lines(EngineConfig(model="demo"), ServerConfig(), resolved_config(), {})
    assert any(" 1 rank, executor" in line for line in alone)


def test_a_pool_below_the_window_bounds_the_prompt() -> None:
    assert "longest prompt: 128 tokens" in lines(num_blocks=17)
    assert "Maximum concurrency for 256 tokens per request: 0.50x" in lines(num_blocks=17)


def test_secrets_are_never_shown() -> None:
    assert "secret" not in "\n".join(lines())


def test_defaults_are_not_listed() -> None:
    assert changed_settings(EngineConfig(model="demo"), ServerConfig()) == []
    changed = EngineConfig(
        model="demo",
        cache=CacheConfig(block_size=32),
        scheduler=SchedulerConfig(max_num_seqs=4),
        seed=3,
    )
    assert changed_settings(changed, ServerConfig(uds="/run/heddle.sock")) == [
        "block_size=32",
        "max_num_seqs=4",
        "seed=3",
        "uds=/run/heddle.sock",
    ]


def test_every_choice_is_told() -> None:
    plan = resolved_config()
    assert len(plan_lines(plan)) == 1
    chosen = replace(plan, reasons=("kernels numba: they are installed",))
    assert plan_lines(chosen)[1:] == ["chosen: kernels numba: they are installed"]
