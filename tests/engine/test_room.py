"""What this host lacks is named with its remedy, before anything starts."""

from __future__ import annotations

import errno
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from heddle.config import EngineConfig, ParallelConfig, ResolvedConfig
from heddle.config.cache import CacheConfig
from heddle.engine import room
from heddle.engine.executors.launch_info import LaunchInfo
from heddle.engine.executors.processes import ProcessesExecutor
from heddle.engine.machine import resolve_here
from heddle.engine.room import (
    DESCRIPTORS_PER_RANK,
    SPARE_DESCRIPTORS,
    check_room,
    free_memory_bytes,
    needed_descriptors,
    raise_descriptor_limit,
    weigh_ranks,
)
from heddle.errors import ConfigError
from tests.support.fake_worker import FAKE, fake_config
from tests.support.processes import LONG_SECONDS, num_descriptors
from tests.support.tiny import build_tiny

GIB = 1 << 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny(tmp_path_factory.mktemp("room"), "llama-8-2"))


def planned(folder: str, executor: str = "inline", pool: int = 1 << 20, **degrees: int) -> Any:
    config = EngineConfig(
        model=folder,
        executor=executor,  # type: ignore[arg-type]
        cache=CacheConfig(kv_cache_memory_bytes=pool),
        parallel=ParallelConfig(**degrees),
    )
    return resolve_here(config)


def test_weights_and_pools_beyond_the_memory_are_refused_by_their_sum(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = planned(folder)
    needed = weigh_ranks(resolved)
    stored = (Path(folder) / "model.safetensors").stat().st_size
    assert stored * 0.9 < needed < stored * 1.3 + 2 * (1 << 20)
    monkeypatch.setattr(room, "free_memory_bytes", lambda: needed)
    check_room(resolved)
    monkeypatch.setattr(room, "free_memory_bytes", lambda: needed - 1)
    with pytest.raises(ConfigError, match=rf"1 rank take {needed:,} bytes in float32, and .*dtype"):
        check_room(resolved)


def test_every_rank_has_its_own_pool_and_a_copy_where_it_shares_none(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = weigh_ranks(planned(folder))
    copies = planned(folder, "processes", prefill_context_parallel_size=2)
    assert weigh_ranks(copies) == 2 * alone
    monkeypatch.setattr(room, "free_memory_bytes", lambda: 2 * alone - 1)
    with pytest.raises(ConfigError, match=r"2 ranks take .* fewer than 2 copies of the weights"):
        check_room(copies)


def test_a_pool_beyond_the_memory_is_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = planned(folder, pool=GIB)
    monkeypatch.setattr(room, "free_memory_bytes", lambda: weigh_ranks(resolved) - 1)
    with pytest.raises(ConfigError, match="a smaller kv_cache_memory_bytes"):
        check_room(resolved)


def test_a_host_with_a_part_of_the_ranks_is_not_asked_for_all(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = planned(folder, "processes", tensor_parallel_size=2)
    monkeypatch.setattr(room, "free_memory_bytes", lambda: 1)
    check_room(resolved, LaunchInfo(rank=0, world_size=2, local_world_size=1))
    with pytest.raises(ConfigError, match="2 ranks take"):
        check_room(resolved, LaunchInfo(rank=0, world_size=2, local_world_size=2))


def test_where_memory_abounds_nothing_is_weighed(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weigh(resolved: ResolvedConfig) -> int:
        raise AssertionError("this imports torch")

    monkeypatch.setattr(room, "weigh_ranks", weigh)
    monkeypatch.setattr(room, "free_memory_bytes", lambda: GIB)
    check_room(planned(folder))
    monkeypatch.setattr(room, "free_memory_bytes", lambda: 1)
    with pytest.raises(AssertionError):
        check_room(planned(folder))


def control_group(folder: Path, most: str, used: int, idle: int) -> Path:
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {idle}\nactive_file 7\n")
    return folder


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    of_the_host = free_memory_bytes(tmp_path / "none")
    assert of_the_host > 1 << 20
    assert free_memory_bytes(control_group(tmp_path, "4096000", 1_000_000, 300_000)) == 3_396_000
    assert free_memory_bytes(control_group(tmp_path, "4096", 1_000_000, 0)) == 0
    unlimited = free_memory_bytes(control_group(tmp_path, "max", 1, 0))
    assert 0.5 * of_the_host < unlimited < 2 * of_the_host
    (tmp_path / "memory.stat").write_text("anon 5\n")
    assert 0.5 * of_the_host < free_memory_bytes(tmp_path) < 2 * of_the_host


@pytest.fixture
def limit() -> Iterator[Callable[[int], None]]:
    """Sets the limit of open files, for one test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda soft: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_too_few_descriptors_are_named(folder: str, limit: Callable[[int], None]) -> None:
    resolved = planned(folder, "processes", tensor_parallel_size=2)
    needed = needed_descriptors(resolved)
    assert needed == SPARE_DESCRIPTORS + 2 * DESCRIPTORS_PER_RANK
    limit(needed - 1)
    with pytest.raises(
        ConfigError, match=rf"may have {needed - 1} files .*, and {needed}.*ulimit -n {needed}"
    ):
        check_room(resolved)
    limit(needed)
    check_room(resolved)


def test_a_program_raises_its_own_limit_as_far_as_it_may(
    limit: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(100)
    raise_descriptor_limit(90)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 100
    raise_descriptor_limit(300)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
    # Where a system sets no bound, one is put here: what a process gives up it does not get back.
    monkeypatch.setattr(resource, "getrlimit", lambda _: (300, 400))
    with pytest.raises(ConfigError, match=r"may have 300 files .*, and 401 are needed"):
        raise_descriptor_limit(401)
    monkeypatch.undo()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300  # left as it was


@pytest.mark.dist
def test_ranks_take_no_more_descriptors_than_are_counted() -> None:
    before = num_descriptors()
    executor = ProcessesExecutor(fake_config({}, tp=4), worker=FAKE)
    try:
        executor.start()
        taken = num_descriptors() - before
        # Channel, output, end and page of each: what is counted is what is really taken.
        assert 4 * 4 <= taken <= 4 * DESCRIPTORS_PER_RANK
    finally:
        executor.close()


def test_a_folder_for_temporary_files_must_be_there(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    resolved = planned(folder, "processes", tensor_parallel_size=2)
    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(ConfigError, match=r"No space left on device.*TMPDIR"):
        check_room(resolved)
    check_room(planned(folder))  # one rank without a process needs none


LIMIT_FILES = "resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0}))".format


@pytest.mark.parametrize(
    ("words", "first", "message"),
    [
        (["-tp", "2"], LIMIT_FILES(SPARE_DESCRIPTORS), "ulimit -n"),
        ([], "room.free_memory_bytes = lambda: 1 << 16", "bytes of memory are free"),
        (["--max-connections", "100000"], LIMIT_FILES(99), "max_connections"),
    ],
    ids=["descriptors", "memory", "connections"],
)
def test_a_server_says_it_in_one_line_and_leaves_nothing(
    folder: str, tmp_path: Path, words: list[str], first: str, message: str
) -> None:
    program = f"""
import resource, sys
from heddle.engine import room
from heddle.cli.main import main
{first}
sys.exit(main(["serve", {folder!r}, "--port", "0", *{words!r}]))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=LONG_SECONDS,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert ended.returncode == 2, ended.stderr
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "Traceback" not in ended.stderr
    assert "listening" not in ended.stderr
    assert re.search(message, errors[0]), errors
    assert list(tmp_path.iterdir()) == []
