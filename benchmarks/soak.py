"""A server under mixed load for a long time, with a fault in every minute of it.

    python benchmarks/soak.py [--seconds 1200] [--fault-every 60] [--clients 4] [--save]

`heddle serve` over a tiny model on two ranks. Clients ask greedy and seeded questions, streamed and
whole, and some of them leave in the middle. Ranks are killed, and stopped, in turns, by their pid.
Every finished answer is held against that of one rank which nobody disturbed. What the server holds
is counted before and after: blocks, descriptors, threads, processes and memory.

Ends with 1 if a token was wrong, an answer was lost, or something was left behind.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import psutil
from support import ROOT, Report, parser, say

sys.path.insert(0, str(ROOT))

from heddle import LLM, SamplingParams
from tests.support.faulty_server import FLAGS, LAYOUT_FLAGS, served_model

LAYOUT = "TP2 DCP2"
STEP_TIMEOUT_SECONDS = 5.0
ALLOWED = {
    "descriptors": 0,
    "processes": 0,
    "blocks used": 0,
    "threads": 8,  # pools start theirs as they need them; what leaks grows with every fault
    "bytes": 64 << 20,
}
"""What there may be more of after the load than before it."""
LEAVE_SHARE = 0.2
"""Of clients that do not wait for the end of their stream."""
RETRIES = 400
LIMIT = 120.0


def questions() -> list[dict[str, Any]]:
    """Prompts of 5 to 200 characters, every other one drawn with a seed."""
    draw = random.Random(7)
    letters = "abcdefghijklmnopqrstuvwxyz "
    found = []
    for number in range(16):
        prompt = "".join(draw.choices(letters, k=draw.choice((5, 20, 60, 200))))
        seeded = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0.0}
        found.append({"prompt": prompt, "max_tokens": draw.choice((4, 16, 48)), **seeded})
    return found


def answers(model: Path, asked: list[dict[str, Any]]) -> list[str]:
    """What one rank says, in float64."""
    with LLM(str(model), dtype="float64", executor="inline") as llm:
        outputs = llm.generate(
            [body["prompt"] for body in asked],
            [
                SamplingParams(ignore_eos=True, **{k: v for k, v in body.items() if k != "prompt"})
                for body in asked
            ],
            use_tqdm=False,
        )
        return [output.outputs[0].text for output in outputs]


class Load:
    """Clients that ask until they are told to stop."""

    def __init__(self, url: str, asked: list[dict[str, Any]], golden: list[str]) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._url, self._asked, self._golden = url, asked, golden
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, num_clients: int) -> None:
        """Begin."""
        for seed in range(num_clients):
            thread = threading.Thread(target=self._work, args=(random.Random(seed),))
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Let every client finish its question."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _work(self, draw: random.Random) -> None:
        with httpx2.Client(base_url=self._url, timeout=LIMIT) as client:
            while not self._is_over.is_set():
                number = draw.randrange(len(self._asked))
                try:
                    text = self._ask(client, number, draw)
                except Exception as error:  # counted, and told at the end
                    self.counts["lost"] += 1
                    self.wrong.append(f"question {number}: {type(error).__name__}: {error}")
                    continue
                if text is None:
                    self.counts["left"] += 1
                elif text == self._golden[number]:
                    self.counts["right"] += 1
                else:
                    self.counts["wrong"] += 1
                    self.wrong.append(f"question {number}: {text!r}, not {self._golden[number]!r}")

    def _ask(self, client: httpx2.Client, number: int, draw: random.Random) -> str | None:
        """The answer; None: this client has left."""
        body = {**self._asked[number], "ignore_eos": True}
        for _ in range(RETRIES):
            if draw.random() < 0.5:
                answer = client.post("/v1/completions", json=body)
                if answer.status_code == 200:
                    text: str = answer.json()["choices"][0]["text"]
                    return text
                status, detail = answer.status_code, answer.text
            else:
                leaves = draw.random() < 2 * LEAVE_SHARE
                with client.stream(
                    "POST", "/v1/completions", json={**body, "stream": True}
                ) as stream:
                    if stream.status_code == 200:
                        return self._read(stream, draw.randrange(1, 5) if leaves else 0)
                    status, detail = stream.status_code, stream.read().decode()
            if status not in (429, 503):
                raise RuntimeError(f"{status} {detail}")
            self.counts["asked again"] += 1
            time.sleep(0.25)
        raise RuntimeError("the server did not come back")

    def _read(self, stream: httpx2.Response, num_events: int) -> str | None:
        """The whole stream, or as many events of it as the client waits for."""
        text = ""
        for count, line in enumerate(filter(is_event, stream.iter_lines()), start=1):
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                return text
            document = json.loads(data)
            if "error" in document:
                raise RuntimeError(f"error event {data}")
            text += document["choices"][0]["text"]
            if count == num_events:
                return None
        raise RuntimeError("the stream ended without [DONE]")


def is_event(line: str) -> bool:
    return line.startswith("data: ")


class Faults:
    """Kills and stops ranks of one server, one at a time."""

    def __init__(self, server: psutil.Process) -> None:
        self.done: Counter[str] = Counter()
        self._server = server
        self._draw = random.Random(3)

    def ranks(self) -> list[psutil.Process]:
        """Rank processes: they are named after their rank."""
        found = self._server.children(recursive=True)
        return [process for process in found if process.name().startswith("heddle-rank")]

    def strike(self) -> None:
        """One fault."""
        ranks = self.ranks()
        if not ranks:
            return  # new ones are on their way
        victim = self._draw.choice(ranks)
        name = ("SIGKILL", "SIGSTOP")[sum(self.done.values()) % 2]
        say(f"{name} to {victim.name()}")
        victim.send_signal(getattr(signal, name))
        self.done[name] += 1


def held(server: psutil.Process, client: httpx2.Client) -> dict[str, int]:
    """What the server holds now."""
    gauges = client.get("/metrics").text
    blocks = re.findall(r'^heddle:kv_blocks\{.*state="(\w+)".*\} ([\d.]+)$', gauges, re.MULTILINE)
    by_state: Counter[str] = Counter()
    for state, count in blocks:
        by_state[f"blocks {state}"] += int(float(count))
    return {
        **by_state,
        "descriptors": server.num_fds(),
        "threads": server.num_threads(),
        "processes": len(server.children(recursive=True)),
        "bytes": server.memory_info().rss,
    }


def settled(
    server: psutil.Process, client: httpx2.Client, wanted: dict[str, int] | None
) -> dict[str, int]:
    """What it holds once it is idle, given a while to let go of what it held before."""
    give_up = time.monotonic() + 30.0
    while True:
        found = held(server, client)
        is_good = wanted is None or not growth(wanted, found) or time.monotonic() > give_up
        if is_good and client.get("/ready").status_code == 200:
            return found
        time.sleep(0.5)


def growth(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """What there is more of; free and cached blocks may change places."""
    found = [
        f"{name}: {before.get(name, 0)} before, {after.get(name, 0)} after"
        for name, allowed in ALLOWED.items()
        if after.get(name, 0) > before.get(name, 0) + allowed
    ]
    pools = [sum(n for name, n in held_.items() if "blocks" in name) for held_ in (before, after)]
    if pools[0] != pools[1]:
        found.append(f"blocks in all: {pools[0]} before, {pools[1]} after")
    return found


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--seconds", type=float, default=1200.0, help="of load")
    flags.add_argument("--fault-every", type=float, default=60.0, help="seconds")
    flags.add_argument("--clients", type=int, default=4)
    arguments = flags.parse_args()
    if arguments.quick:
        arguments.seconds, arguments.fault_every = 30.0, 12.0
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        return soak(arguments, Path(folder))


def soak(arguments: Any, folder: Path) -> int:
    """Run it, print it."""
    model, asked = served_model(folder), questions()
    golden = answers(model, asked)
    words = [*FLAGS, *LAYOUT_FLAGS[LAYOUT], "--step-timeout", str(STEP_TIMEOUT_SECONDS)]
    command = [sys.executable, "-m", "heddle", "serve", str(model), *words]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--max-restarts", "1000"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")},
        )
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        found = run(arguments, psutil.Process(process.pid), ready["url"], asked, golden)
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(LIMIT)
        process.communicate()
    if code != 0:
        found["troubles"].append(f"the server ended with {code}")
    report = Report("soak", f"{arguments.seconds:g} s of load with faults")
    report.table("answers", ["what", "count"], sorted(found["counts"].items()))
    report.table("faults", ["signal", "count"], sorted(found["faults"].items()))
    rows = [[name, found["before"].get(name, 0), count] for name, count in found["after"].items()]
    report.table("held by the server", ["what", "before", "after"], rows)
    for trouble in found["troubles"]:
        report.note(trouble)
    report.finish(arguments, found)
    return 1 if found["troubles"] else 0


def run(
    arguments: Any,
    server: psutil.Process,
    url: str,
    asked: list[dict[str, Any]],
    golden: list[str],
) -> dict[str, Any]:
    """Load and faults; what came of them."""
    faults, load = Faults(server), Load(url, asked, golden)
    with httpx2.Client(base_url=url, timeout=LIMIT) as client:
        warm = Load(url, asked, golden)
        warm.start(arguments.clients)
        time.sleep(min(5.0, arguments.seconds / 4))
        warm.stop()
        before = settled(server, client, None)
        load.start(arguments.clients)
        end = time.monotonic() + arguments.seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, arguments.fault_every))
            if end - time.monotonic() > 0:
                faults.strike()
        load.stop()
        after = settled(server, client, before)
    troubles = [*warm.wrong, *load.wrong, *growth(before, after)]
    if load.counts["right"] == 0:
        troubles.append("no answer was right")
    return {
        "counts": dict(load.counts),
        "faults": dict(faults.done),
        "before": before,
        "after": after,
        "troubles": troubles,
    }


if __name__ == "__main__":
    raise SystemExit(main())
