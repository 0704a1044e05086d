"""Engines from prompt to tokens, against peers, interleaved.

latency       one stream, over prompt lengths
throughput    several streams at once
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from heddle.bench.contest import Contestant, HeddleEngine, bench_config, race, text_prompts
from heddle.bench.float_folder import float_folder
from heddle.bench.peer import Peer, peer_command
from heddle.config.engine import EngineConfig, ResolvedConfig
from heddle.engine.llm import LLM
from heddle.errors import ConfigError

Report = Callable[[str], object]

GGUF_PEERS = ("llama.cpp",)
"""Peers that read the `.gguf` file itself; the others read its numbers in float32."""


def measure_latency(
    config: EngineConfig,
    *,
    prompt_lens: Sequence[int],
    num_tokens: int,
    rounds: int,
    peers: Sequence[str] = (),
    peers_dir: Path,
    report: Report,
) -> dict[str, Any]:
    """One stream: time to the first token, and tokens a second before and after it.

    Args:
        config: of our engine.
        prompt_lens: tokens of the prompts.
        num_tokens: of each answer.
        rounds: times that each engine answers each prompt.
        peers: names of other engines.
        peers_dir: where these are set up.
        report: told what is done.
    Returns:
        `{engine, peers, prompts: [{prompt_len, num_streams, num_tokens, engines: [...]}]}`, see
        `race`.
    Raises:
        ConfigError: a prompt with its answer does not fit, or a peer is absent.
    """
    cases = [(length, 1) for length in prompt_lens]
    return _measure(config, cases, num_tokens, rounds, peers, peers_dir, report)


def measure_throughput(
    config: EngineConfig,
    *,
    prompt_len: int,
    streams: Sequence[int],
    num_tokens: int,
    rounds: int,
    peers: Sequence[str] = (),
    peers_dir: Path,
    report: Report,
) -> dict[str, Any]:
    """Several streams at once; arguments and result as `measure_latency`."""
    cases = [(prompt_len, count) for count in streams]
    return _measure(config, cases, num_tokens, rounds, peers, peers_dir, report)


def _measure(
    config: EngineConfig,
    cases: Sequence[tuple[int, int]],
    num_tokens: int,
    rounds: int,
    peers: Sequence[str],
    peers_dir: Path,
    report: Report,
) -> dict[str, Any]:
    commands = {name: peer_command(name, peers_dir) for name in peers}  # absent ones: said at once
    config = bench_config(config, num_streams=max(count for _, count in cases))
    longest = max(length for length, _ in cases) + num_tokens
    with LLM.from_config(config) as llm, ExitStack() as stack:
        _check_fits(llm.plan, longest)
        contestants: list[Contestant] = [HeddleEngine(llm.driver)]
        for name, command in commands.items():
            report(f"loading {name}")
            contestants.append(stack.enter_context(_start(name, command, llm.plan, longest)))
        found = []
        for length, count in cases:
            report(f"{count} x {length} tokens")
            vocab_size = llm.plan.model.vocab_size
            prompts = text_prompts(llm.get_tokenizer(), vocab_size, length, count)
            rows = race(contestants, prompts, num_tokens, rounds)
            case = {"prompt_len": length, "num_streams": count, "num_tokens": num_tokens}
            found.append({**case, "engines": rows})
        facts = [each.facts for each in contestants if isinstance(each, Peer)]
        return {"engine": describe_engine(llm.plan), "peers": facts, "prompts": found}


@contextmanager
def _start(
    name: str, command: Sequence[str], plan: ResolvedConfig, max_model_len: int
) -> Iterator[Peer]:
    """A peer with as many threads as all our ranks together."""
    path = Path(plan.model_path)
    model = path if name in GGUF_PEERS else float_folder(path, plan.model)
    num_threads = plan.num_threads * plan.parallel.world_size
    with Peer(command, model, num_threads=num_threads, max_model_len=max_model_len) as peer:
        yield peer


def _check_fits(plan: ResolvedConfig, longest: int) -> None:
    if longest > plan.scheduler.max_model_len:
        raise ConfigError(
            f"a prompt with its answer has {longest} tokens; the window is "
            f"{plan.scheduler.max_model_len} tokens (nearest: {plan.scheduler.max_model_len})"
        )


def describe_engine(plan: ResolvedConfig) -> dict[str, Any]:
    """What of our engine a time depends on."""
    parallel = plan.parallel
    return {
        "tp": parallel.tensor_parallel_size,
        "pcp": parallel.prefill_context_parallel_size,
        "dcp": parallel.decode_context_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "dp": parallel.data_parallel_size,
        "executor": plan.executor,
        "num_threads": plan.num_threads,
        "dtype": plan.dtype,
        "kv_cache_dtype": plan.kv_cache_dtype,
        "backend": plan.backend,
        "kernels": plan.kernels,
        "quantization": plan.quantization,
        "cpu_comm_backend": plan.cpu_comm_backend,
        "block_size": plan.cache.block_size,
    }
