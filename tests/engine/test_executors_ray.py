"""Ranks on the nodes of a Ray cluster: a fake one here, and Ray's own where it is installed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from heddle.config import SamplingParams
from heddle.engine.args import engine_config
from heddle.engine.executors import create_executor, deadline, processes, ray_ranks
from heddle.engine.executors import ranks as ranks_module
from heddle.engine.executors.ray_cluster import ray_words
from heddle.engine.executors.ray_executor import RayExecutor
from heddle.engine.llm import LLM
from heddle.engine.machine import resolve_here
from heddle.errors import ConfigError, ModelFileError, RankFailed, UnsupportedError
from tests.support.byte_tokenizer import printable, save_folder
from tests.support.fake_worker import FAKE, fake_batch, fake_config
from tests.support.processes import (
    LONG_SECONDS,
    is_running,
    listening_addresses,
    num_descriptors,
    seconds_until,
)
from tests.support.ray_clusters import HAS_RAY, RunningCluster, fake_cluster, real_cluster
from tests.support.tiny import build_tiny

pytestmark = [pytest.mark.dist, pytest.mark.timeout(1200)]
CLUSTERS = {"fake, two nodes": [1, 1], "fake, one node": [2]}
if HAS_RAY:
    CLUSTERS |= {"ray, two nodes": [1, 1], "ray, one node": [2]}
PROMPT = "a loom makes cloth out of threads"
SETTINGS = {"block_size": 4, "num_blocks_override": 60, "max_num_batched_tokens": 8}
LAYOUT = {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2}
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
ON_ONE_NODE = pytest.mark.parametrize(
    "cluster", [name for name in CLUSTERS if name.endswith("one node")], indirect=True
)
"""What is the same on several nodes, and would only take longer there."""
LIMIT_SECONDS = 5.0
"""Of steps that hang."""
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=CLUSTERS)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningCluster]:
    cpus = CLUSTERS[request.param]
    if request.param.startswith("fake"):
        with fake_cluster(cpus) as running:
            yield running
    else:
        with real_cluster(cpus, tmp_path_factory.mktemp("ray")) as running:
            yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(build_tiny(tmp_path_factory.mktemp("tiny"), "llama-6-2"), printable())


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    with LLM(str(folder), executor="inline", num_threads=1, **SETTINGS) as llm:
        (output,) = llm.generate(PROMPT, PARAMS, use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a test does not set itself must not end a wait, however busy the machine is."""
    monkeypatch.setattr(deadline, "FLOOR_SECONDS", LONG_SECONDS)
    monkeypatch.setattr(processes, "_SETTLE_SECONDS", LONG_SECONDS)
    monkeypatch.setattr(ranks_module, "_STOP_SECONDS", LONG_SECONDS)
    monkeypatch.setattr(ranks_module, "_REAP_SECONDS", LONG_SECONDS)


@pytest.fixture
def create(
    cluster: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., RayExecutor]]:
    """Executors of two ranks, one to a CPU; after the test nothing of them is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def create_with(script: dict[str, str] | None = None, **options: Any) -> RayExecutor:
        settings = {"tp": 2, "executor": "ray", "cpu_comm_backend": cluster.link} | options
        return RayExecutor(fake_config(script, **settings), worker=FAKE)

    # Ray's own threads and sockets come and go; those of the fake are counted.
    before = num_descriptors()
    yield create_with
    if cluster.is_fake:
        assert seconds_until(lambda: num_descriptors() <= before) < LONG_SECONDS
        assert not any(actor.is_running for actor in cluster.ray.actors)
    assert list(tmp_path.glob("heddle-*")) == []


def first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]


def rank_pids(executor: RayExecutor) -> list[int]:
    """Processes of the ranks, which `pids` names only where all live on the driver's node."""
    return [rank.handle.pid for rank in executor._running()._ranks]


def actor_pids(pids: list[int]) -> list[int]:
    """The processes that Ray started, each the parent of a rank."""
    return [psutil.Process(pid).ppid() for pid in pids]


def test_two_ranks_say_what_one_rank_says(
    cluster: RunningCluster, folder: Path, expected: list[int]
) -> None:
    with LLM(str(folder), distributed_executor_backend="ray", **LAYOUT, **SETTINGS) as llm:
        (output,) = llm.generate(PROMPT, PARAMS, use_tqdm=False)
        plan = llm.plan
    assert list(output.outputs[0].token_ids) == expected
    assert (plan.executor, plan.cpu_comm_backend, plan.num_threads) == ("ray", cluster.link, 1)
    why = {"shm": "all ranks live on this host", "gloo": "Ray has placed ranks on 2 hosts"}
    assert f"cpu_comm_backend: {cluster.link}, since {why[cluster.link]}" in plan.reasons


def test_replies_and_lines_of_ranks_come_to_the_driver_and_all_ends_with_it(
    cluster: RunningCluster, create: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with create({"1:2": "print INFO woven"}) as executor:
        pids = rank_pids(executor)
        assert executor.pids == (tuple(pids) if cluster.num_nodes == 1 else ())
        assert len({*pids, *actor_pids(pids)}) == 4
        pids += actor_pids(pids)
        for step in range(3):
            replies = executor.execute(fake_batch(step, epoch=5), 2**64 - 1)
            assert [reply.coverage for reply in replies] == [(0,), (1,)]
            assert replies[0].sampled[0].token_id == 2 * step + 1
        assert list(Path(tempfile.gettempdir()).iterdir()) == []  # no folder, and no door
        if cluster.num_nodes == 1:
            assert listening_addresses(rank_pids(executor)) == []
    assert seconds_until(lambda: not any(map(is_running, pids))) < LONG_SECONDS
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.endswith("Z INFO rank1 tp1 pcp0 dcp0 e5 woven")]


@ON_ONE_NODE
def test_the_rank_at_fault_is_named_at_once(create: Any) -> None:
    with create({"1:4": "abort"}) as executor:
        executor.execute(fake_batch(3), 0)
        pids = rank_pids(executor)
        started = time.monotonic()
        with pytest.raises(RankFailed) as caught:
            executor.execute(fake_batch(4, epoch=2), 0)
        assert time.monotonic() - started < LONG_SECONDS / 2
        words = "rank1 tp1 pcp0 dcp0 failed in step 4 of epoch 2: its process was killed by SIGABRT"
        assert first_line(caught.value) == words
        assert "last words before abort" in str(caught.value)
        assert seconds_until(lambda: not any(map(is_running, pids))) < LONG_SECONDS
        with pytest.raises(RankFailed, match=r"step 5 is refused.*closed because rank1 "):
            executor.execute(fake_batch(5), 0)


def test_a_killed_actor_is_named_with_its_rank_and_nothing_stays(create: Any) -> None:
    with create({"1:1": "sleep 600"}) as executor:
        executor.execute(fake_batch(0), 0)
        pids = rank_pids(executor)
        executor.submit({0: (fake_batch(1), 0)})
        os.kill(actor_pids(pids)[1], signal.SIGKILL)
        with pytest.raises(RankFailed) as caught:
            executor.collect(0)
        words = r"rank1 tp1 pcp0 dcp0 failed in step 1 of epoch 0: its Ray actor ended: The actor "
        assert re.match(words + ".*its worker process has died", first_line(caught.value))
        assert seconds_until(lambda: not any(map(is_running, pids))) < LONG_SECONDS


@ON_ONE_NODE
def test_a_hung_rank_is_named_by_the_deadline_with_its_stacks(
    create: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_ranks, "_STACKS_SECONDS", LONG_SECONDS)
    # It holds the interpreter's lock, so it cannot see its driver go.
    with create({"1:2": "spin 600"}, step_timeout_seconds=LIMIT_SECONDS) as executor:
        executor.execute(fake_batch(1), 0)
        pids = rank_pids(executor)
        started = time.monotonic()
        with pytest.raises(RankFailed) as caught:
            executor.execute(fake_batch(2), 0)
        # The longest wait for an end is twice that.
        assert time.monotonic() - started < LONG_SECONDS / 2
        assert seconds_until(lambda: not any(map(is_running, pids))) < LONG_SECONDS
    words = "rank1 tp1 pcp0 dcp0 failed in step 2 of epoch 0: it did not answer"
    assert first_line(caught.value).startswith(words)
    assert "in _act" in str(caught.value)
    assert "then rank0 tp0 pcp0 dcp0: CollectiveTimeout" in str(caught.value)


@ON_ONE_NODE
def test_a_start_that_fails_shows_the_first_cause(create: Any) -> None:
    with pytest.raises(ModelFileError, match=r"missing tensor x; .*\[rank1 tp1 pcp0 dcp0\]"):
        create({"1:start": "missing"}).start()


@ON_ONE_NODE
def test_actors_that_find_no_room_are_an_error_in_words(
    create: Any, cluster: RunningCluster
) -> None:
    with create() as executor:  # holds all CPUs
        if cluster.is_fake:
            cluster.ray.is_full = True
        with pytest.raises(RankFailed) as caught:
            create(startup_timeout_seconds=3.0).start()
        if cluster.is_fake:
            cluster.ray.is_full = False
        words = "rank0 tp0 pcp0 dcp0 failed while starting: Ray did not start its actor in time"
        assert first_line(caught.value) == f"{words}, with 1 CPU on 127.0.0.1"
        assert executor.execute(fake_batch(1), 0)[0].sampled[0].token_id == 3


def test_a_cluster_that_is_too_small_is_refused_before_anything_starts(
    cluster: RunningCluster, folder: Path
) -> None:
    config = engine_config(str(folder), executor="ray", prefill_context_parallel_size=3)
    with pytest.raises(ConfigError, match=r"3 ranks of 1 CPU each .* room for 2 of them"):
        resolve_here(config)
    config = engine_config(str(folder), executor="ray", num_threads=2, **LAYOUT)
    with pytest.raises(ConfigError, match=r"2 ranks of 2 CPUs each .* room for [01] of them"):
        resolve_here(config)


def test_without_ray_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UnsupportedError, match=r"install heddle-llm\[ray\] on every node"):
        resolve_here(engine_config(str(folder), executor="ray"))


def test_without_a_cluster_none_is_started(folder: Path) -> None:
    config = engine_config(str(folder), executor="ray")
    with (
        fake_cluster([]) as running,
        pytest.raises(
            ConfigError, match=r"could not join .* Could not find any running Ray"
        ) as why,
    ):
        resolve_here(config)
    assert "at length" not in str(why.value)
    assert not running.ray.joined


def test_words_of_ray_are_one_line_with_the_cause_at_its_end() -> None:
    short = RuntimeError("\x1b[36mray::A\x1b[39m died:\n\tactor_id: 7\n  File x\nKeyError: 3")
    assert ray_words(short) == "ray::A died: KeyError: 3"
    long = RuntimeError("The actor died\n" + "of much\n" * 99 + "No module named 'heddle'")
    words = ray_words(long)
    assert words.startswith("The actor died of much of")
    assert words.endswith("of much No module named 'heddle'")
    assert len(words) < 500
    assert ray_words(ValueError()) == "ValueError"


def test_create_follows_the_name() -> None:
    assert type(create_executor(fake_config(executor="ray"))) is RayExecutor


def test_an_actor_holds_the_cpus_of_its_rank_and_gets_plain_data() -> None:
    with fake_cluster([4, 2]) as running:
        config = fake_config(tp=2, executor="ray", num_threads=2)
        with RayExecutor(config, worker=FAKE) as executor:
            executor.execute(fake_batch(0), 0)
        actors = running.ray.actors
        assert [actor.options["num_cpus"] for actor in actors] == [2, 2]
        assert [actor.options["max_restarts"] for actor in actors] == [0, 0]
        assert [a.options["scheduling_strategy"].node_id for a in actors] == ["node0", "node0"]
        kinds = [[type(value) for value in actor.arguments] for actor in actors]
        assert kinds == [[str, str, int, str]] * 2
        assert [actor.arguments[2] for actor in actors] == [0, 1]


# A driver that is killed in the middle of a step; its cluster is a fake one, or one it joins.
PROGRAM = """
import json, os, sys, threading, time
sys.path.insert(0, {root!r})
if not {address!r}:
    from tests.support.fake_ray import install
    install({cpus!r})
else:
    os.environ["RAY_ADDRESS"] = {address!r}
from heddle.engine.executors.ray_executor import RayExecutor
from tests.support.fake_worker import FAKE, fake_batch, fake_config
executor = RayExecutor(
    fake_config({{"1:0": "sleep 600"}}, tp=2, executor="ray", cpu_comm_backend={link!r}),
    worker=FAKE,
)
executor.start()
pids = [rank.handle.pid for rank in executor._running()._ranks]
threading.Thread(target=executor.execute, args=(fake_batch(0), 0), daemon=True).start()
time.sleep(0.5)
print(json.dumps(pids), flush=True)
time.sleep(600)
"""


@ON_ONE_NODE
def test_a_killed_driver_leaves_no_rank(cluster: RunningCluster) -> None:
    program = PROGRAM.format(
        root=str(ROOT), address=cluster.address, cpus=[2, 1][: cluster.num_nodes], link=cluster.link
    )
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pids = json.loads(driver.stdout.readline())
    assert len(pids) == 2
    assert all(map(is_running, pids))
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert seconds_until(lambda: not any(map(is_running, pids))) < LONG_SECONDS
