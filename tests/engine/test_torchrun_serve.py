"""A server over ranks that torchrun started: rank 0 serves, and the others end with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import psutil
import pytest

from heddle.config import SamplingParams
from heddle.engine.llm import LLM
from tests.support.byte_tokenizer import printable, save_folder
from tests.support.processes import LONG_SECONDS, is_running, seconds_until
from tests.support.tiny import build_tiny

PROMPT = "a loom makes cloth out of threads"
MAX_TOKENS = 8
SETTINGS = {"block_size": 4, "num_blocks_override": 60, "max_num_batched_tokens": 8}
FLAGS = "--block-size 4 --num-gpu-blocks-override 60 --max-num-batched-tokens 8 --num-threads 1"
LAYOUT = "-pcp 2 -dcp 2 --port 0 --json"
pytestmark = [pytest.mark.dist, pytest.mark.timeout(1200)]


def test_a_launched_server_says_what_one_rank_says_and_drains_with_its_driver(
    tmp_path: Path,
) -> None:
    folder = save_folder(build_tiny(tmp_path, "llama-6-2"), printable())
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    with LLM(str(folder), executor="inline", num_threads=1, **SETTINGS) as llm:
        (expected,) = llm.generate(PROMPT, params, use_tqdm=False)
    torchrun = Path(sys.executable).with_name("torchrun")
    words = f"--standalone --nproc-per-node 2 -m heddle serve {folder} {LAYOUT} {FLAGS}"
    log = tmp_path / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [torchrun, *words.split()],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(round(LONG_SECONDS))},
        ) as launcher,
    ):
        assert launcher.stdout is not None
        line = launcher.stdout.readline()
        assert line, log.read_text()
        ready = json.loads(line)
        assert (ready["layout"]["executor"], ready["layout"]["world_size"]) == ("torchrun", 2)
        ranks = [child.pid for child in psutil.Process(launcher.pid).children()]
        assert len(ranks) == 2
        assert ready["pid"] in ranks
        body = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        answer = httpx2.post(f"{ready['url']}/v1/completions", json=body, timeout=LONG_SECONDS)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == expected.outputs[0].text
        # To rank 0 alone: torchrun would hand a signal of its own to all ranks at once.
        os.kill(ready["pid"], signal.SIGTERM)
        assert launcher.wait(LONG_SECONDS) == 0, log.read_text()
        assert launcher.stdout.read() == ""  # the other rank prints nothing
    assert seconds_until(lambda: not any(map(is_running, ranks))) < LONG_SECONDS
    assert "stopping: 0 open requests" in log.read_text()
