"""Ranks that launchers on two hosts started say what one rank says."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from heddle.config import SamplingParams
from heddle.engine.llm import LLM
from tests.support.byte_tokenizer import printable, save_folder
from tests.support.tiny import build_tiny
from tests.support.two_hosts import LOOPBACK_HOSTS, Host, run_on, separate_hosts

MAX_TOKENS = 8
PROMPT = "a loom makes cloth out of threads"
SETTINGS = {"block_size": 4, "num_blocks_override": 60, "max_num_batched_tokens": 8}
FLAGS = "--block-size 4 --num-gpu-blocks-override 60 --max-num-batched-tokens 8 --num-threads 1"
LAYOUTS = {
    # Heads are split within a host, rows and stored KV across both.
    "rows and context": ("-tp", "2", "-pcp", "2", "-dcp", "4"),
    "a stage per host": ("-pp", "2", "-pcp", "2", "-dcp", "2"),
    "a replica per host": ("-dp", "2", "-pcp", "2", "-dcp", "2"),
}
SECONDS = 900.0
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(build_tiny(tmp_path_factory.mktemp("hosts"), "llama-6-2"), printable())


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    with LLM(str(folder), executor="inline", num_threads=1, **SETTINGS) as llm:
        (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def launch(
    hosts: Sequence[Host], folder: Path, layout: Sequence[str], *, ranks_per_host: int
) -> dict[str, Any]:
    """What rank 0 prints; no other rank prints anything."""
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    port = free_port()
    what = ["-m", "heddle", "generate", str(folder), PROMPT, "--json", "--ignore-eos"]
    commands = [
        [
            *(torchrun, "--nnodes", str(len(hosts)), "--node-rank", str(place)),
            *("--nproc-per-node", str(ranks_per_host), "--local-addr", host.address),
            *("--master-addr", hosts[0].address, "--master-port", str(port)),
            *(*what, "--max-tokens", str(MAX_TOKENS), *FLAGS.split(), *layout),
        ]
        for place, host in enumerate(hosts)
    ]
    first, second = run_on(hosts, commands, seconds=SECONDS)
    assert first.returncode == 0, first.stderr
    assert second.returncode == 0, second.stderr
    assert second.stdout == ""
    document: dict[str, Any] = json.loads(first.stdout)
    return document


def free_port() -> int:
    """A port that nobody uses; below those that the system gives to whoever asks for any, so that
    it is still free when the launchers come."""
    for port in range(20000 + os.getpid() % 10000, 32000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_two_hosts_say_what_one_rank_says(
    folder: Path, expected: list[int], layout: Sequence[str]
) -> None:
    with separate_hosts() as hosts:
        document = launch(hosts, folder, layout, ranks_per_host=2)
    assert document["token_ids"] == expected
    assert document["layout"]["executor"] == "torchrun"
    assert document["layout"]["world_size"] == 4


@pytest.mark.dist
def test_two_loopback_addresses_are_hosts_enough(folder: Path, expected: list[int]) -> None:
    document = launch(LOOPBACK_HOSTS, folder, ("-pcp", "2", "-dcp", "2"), ranks_per_host=1)
    assert document["token_ids"] == expected
    assert document["layout"]["world_size"] == 2
