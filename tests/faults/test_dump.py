"""What is kept of a failure: private, bounded, and read back as it was."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from heddle.config.faults import fault_rules
from heddle.errors import ConfigError
from heddle.faults.dump import MAX_FILES, NUM_STEPS, create_dump, read_dump, write_dump
from heddle.faults.page import call_words
from heddle.faults.watch import create_watch


def dump_of_one_rank():
    watch = create_watch((), 0, 0)
    for step in range(NUM_STEPS + 3):
        watch.begin_step(step, "decode")
        watch.begin_call(call_words("all_reduce", "tp", "float32", (2, 8)))
        watch.end_call()
    standing = watch.page.standing()
    assert standing is not None
    return create_dump("rank0: it did not answer", ["rank0"], {"tp": ((0, 1),)}, [standing])


def test_a_dump_is_private_and_comes_back_as_it_was(tmp_path: Path) -> None:
    dump, folder = dump_of_one_rank(), tmp_path / "new" / "dumps"
    old_mask = os.umask(0)
    try:
        path = write_dump(dump, folder)
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert read_dump(path) == dump


def test_of_an_error_the_first_line_is_kept() -> None:
    """What follows may be a traceback with the words of a user in it."""
    dump = create_dump("rank1 tp1: KeyError: 7\nTraceback: a secret\n", ["rank0"], {}, [])
    assert dump.cause == "rank1 tp1: KeyError: 7"


def test_only_the_last_steps_are_kept() -> None:
    (standing,) = dump_of_one_rank().ranks
    assert [call.step for call in standing.calls] == list(range(3, NUM_STEPS + 3))


def test_the_oldest_files_go(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("{}")
    paths = [write_dump(dump_of_one_rank(), tmp_path) for _ in range(MAX_FILES + 3)]
    assert sorted(tmp_path.glob("dump-*")) == sorted(paths)[-MAX_FILES:]
    assert (tmp_path / "mine.json").exists()


def test_disk_full_fails_the_dump(tmp_path: Path) -> None:
    rules = fault_rules("disk_full(driver,dump,0)")
    with pytest.raises(OSError, match="no space left") as found:
        write_dump(dump_of_one_rank(), tmp_path, rules)
    assert found.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("body", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"schema": "x"}'])
def test_what_is_no_dump_is_refused_in_words(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(body)
    with pytest.raises(ConfigError, match="is no dump of this version"):
        read_dump(path)


def test_a_dump_of_another_version_and_none_at_all(tmp_path: Path) -> None:
    path = write_dump(dump_of_one_rank(), tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"schema":1', b'"schema":99'))
    with pytest.raises(ConfigError, match="has schema 99; this version reads 1"):
        read_dump(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_dump(tmp_path / "absent.json")
