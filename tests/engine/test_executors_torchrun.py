"""Ranks that torchrun started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from heddle.engine.executors import create_executor
from heddle.engine.executors.launch_info import LaunchInfo
from heddle.errors import ConfigError
from tests.support.fake_worker import fake_config
from tests.support.processes import LONG_SECONDS

pytestmark = pytest.mark.timeout(1200)
ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, os, signal, sys, time
sys.path.insert(0, {root!r})
# The launcher ends all processes once one has failed; the facts must be out by then.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
from heddle.engine.executors import deadline
from heddle.engine.executors.launch_info import LaunchInfo
from heddle.engine.executors.torchrun import TorchrunExecutor, serve_rank
from heddle.errors import HeddleError
from tests.support.fake_worker import FAKE, fake_batch, fake_config

deadline.FLOOR_SECONDS = {limit}
launch = LaunchInfo.from_environment(os.environ)
resolved = fake_config({script!r}, executor="torchrun", **{layout!r})
if launch.rank:
    try:
        serve_rank(resolved, launch, worker=FAKE)
    except HeddleError as error:
        print(json.dumps({{"rank1": str(error)}}), flush=True)
        sys.exit(1)
    print(json.dumps({{"rank1": "served"}}), flush=True)
    sys.exit(0)
executor = TorchrunExecutor(resolved, launch, worker=FAKE)
executor.start()
steps = []
facts = {{"steps": steps}}
for step in range(4):
    try:
        started = time.monotonic()
        replies = executor.execute(fake_batch(step), 2**63)
        (token,) = [token for reply in replies for token in reply.sampled]
        steps.append([token.token_id, [reply.coverage for reply in replies]])
    except HeddleError as error:
        facts |= {{"error": str(error), "seconds": time.monotonic() - started}}
        break
{middle}
print(json.dumps(facts), flush=True)
{end}
"""


def run_under_torchrun(
    tmp_path: Path,
    script: dict[str, str],
    end: str,
    *,
    middle: str = "",
    layout: dict[str, int] | None = None,
) -> tuple[int, Any, Any]:
    """Exit status, and what ranks 0 and 1 printed."""
    program = tmp_path / "program.py"
    fields = {"script": script, "middle": middle, "end": end, "layout": layout or {"tp": 2}}
    program.write_text(PROGRAM.format(root=str(ROOT), limit=LONG_SECONDS, **fields))
    torchrun = Path(sys.executable).with_name("torchrun")
    done = subprocess.run(
        [torchrun, "--standalone", "--nproc-per-node", "2", program],
        capture_output=True,
        text=True,
        # When one rank has failed, the launcher kills the other after 30 s otherwise.
        env={**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(round(LONG_SECONDS))},
        timeout=1000,
    )
    facts = [json.loads(line) for line in done.stdout.splitlines()]
    (rank0,) = [fact for fact in facts if "steps" in fact]
    (rank1,) = [fact["rank1"] for fact in facts if "rank1" in fact]
    return done.returncode, rank0, rank1


@pytest.mark.dist
def test_launched_ranks_run_steps_and_leave_with_the_driver(tmp_path: Path) -> None:
    # The program ends without closing its executor.
    status, rank0, rank1 = run_under_torchrun(tmp_path, {}, "")
    assert status == 0
    assert rank0 == {"steps": [[2 * step + 1, [[0], [1]]] for step in range(4)]}
    assert rank1 == "served"


SEVERAL = """
executor.submit({0: (fake_batch(7), 1), 1: (fake_batch(9), 1)})
executor.submit({1: (fake_batch(10), 1)})
facts["order"] = []
for _ in range(3):
    replica = executor.first_done()
    replies = executor.collect(replica)
    facts["order"].append([replica, [[reply.step, *reply.coverage] for reply in replies]])
"""


@pytest.mark.dist
def test_launched_replicas_have_queues_of_their_own(tmp_path: Path) -> None:
    status, rank0, rank1 = run_under_torchrun(tmp_path, {}, "", middle=SEVERAL, layout={"dp": 2})
    assert status == 0
    assert rank0["order"] == [[0, [[7, 0]]], [1, [[9, 1]]], [1, [[10, 1]]]]
    assert rank1 == "served"


@pytest.mark.dist
def test_launched_stages_have_two_steps_under_way(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    script = {"1:7": f"wait {begun}", "0:9": f"signal {begun}"}
    status, rank0, _ = run_under_torchrun(
        tmp_path,
        script,
        "",
        middle=SEVERAL.replace(", 1: (", "}); executor.submit({0: (").replace(
            "{1: (fake_batch(10)", "{0: (fake_batch(10)"
        ),
        layout={"pp": 2},
    )
    assert status == 0
    assert rank0["order"] == [[0, [[step, 0], [step, 1]]] for step in (7, 9, 10)]


@pytest.mark.dist
def test_a_launched_rank_that_fails_names_itself_and_ends_the_driver_s_step(tmp_path: Path) -> None:
    status, rank0, rank1 = run_under_torchrun(tmp_path, {"1:2": "raise"}, "sys.exit(1)")
    assert status != 0
    assert len(rank0["steps"]) == 2
    assert rank1.splitlines()[0] == (
        "rank1 tp1 pcp0 dcp0 failed in step 2 of epoch 0: ValueError: boom on rank 1 at 2"
    )
    first_line = rank0["error"].splitlines()[0]
    assert first_line.startswith("rank0 tp0 pcp0 dcp0 failed in step 2 of epoch 0: RankFailed: ")
    assert first_line.endswith("the first cause is in the output of the rank that ended first")
    assert rank0["seconds"] < LONG_SECONDS / 2  # the step's limit is twice that


def test_create_needs_a_launcher_for_torchrun() -> None:
    with pytest.raises(ConfigError, match="executor=torchrun without a launcher"):
        create_executor(fake_config(executor="torchrun"))
    launch = LaunchInfo(rank=0, world_size=2, local_world_size=2)
    executor = create_executor(fake_config(tp=2, executor="torchrun"), launch=launch)
    assert type(executor).__name__ == "TorchrunExecutor"


@pytest.mark.parametrize(
    ("rank", "world_size", "words"),
    [
        (1, 2, "RANK=1 cannot be the driver"),
        (0, 3, "the launcher started 3 processes, the layout has 2 ranks"),
    ],
)
def test_a_launch_that_does_not_fit_is_refused(rank: int, world_size: int, words: str) -> None:
    launch = LaunchInfo(rank=rank, world_size=world_size, local_world_size=world_size)
    with pytest.raises(ConfigError, match=words):
        create_executor(fake_config(tp=2, executor="torchrun"), launch=launch)


def test_launch_info_reads_the_launchers_variables() -> None:
    environment = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "HOME": "/"}
    assert LaunchInfo.from_environment(environment) == LaunchInfo(
        rank=5, world_size=8, local_world_size=4
    )
    assert LaunchInfo.from_environment({"RANK": "5"}) is None
    environment |= {"MASTER_ADDR": "10.0.0.1", "GLOO_SOCKET_IFNAME": "eth1"}
    launch = LaunchInfo.from_environment(environment)
    assert launch is not None
    assert (launch.master_address, launch.interface) == ("10.0.0.1", "eth1")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x'; a launcher sets it to a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "-2"}, "WORLD_SIZE='-2'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 with WORLD_SIZE=2; a rank is below"),
    ],
)
def test_launch_info_refuses_nonsense_in_words(variables: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LaunchInfo.from_environment(variables)
