from __future__ import annotations

import os

import pytest

from heddle.comm.shared_memory.segment import (
    Segment,
    create_segment,
    digest_of,
    refusal,
    word_index,
)
from heddle.errors import HeddleError
from tests.support.processes import nothing_left
from tests.support.shared_memory import mapped

GIB = 1 << 30


def test_ranks_share_memory_where_stores_stay_in_order_and_there_is_room() -> None:
    assert refusal(2, GIB, machine="x86_64") is None
    assert refusal(2, GIB, machine="aarch64") == "aarch64 does not keep stores in order"
    assert refusal(2, GIB >> 2, machine="x86_64") == (
        "2 ranks may come to share 96 MiB, more than a quarter of the 256 MiB that are free"
    )


def test_a_system_that_gives_no_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert refusal(2, GIB, machine="AMD64") == "memfd_create is refused: Operation not permitted"
    monkeypatch.delattr(os, "memfd_create")
    assert refusal(2, GIB, machine="AMD64") == "this system has no memfd_create"


def test_nobody_can_cut_the_memory_of_others() -> None:
    descriptor = create_segment(2)
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def test_two_mappings_are_one_memory() -> None:
    with mapped(2) as one:
        other = Segment(os.dup(one.descriptor), 2)
        one.words[word_index(8192)] = 2**64 - 1
        assert other.words[word_index(8192)] == 2**64 - 1
        other.write_text(4096, 9, "four byte \u00e9")
        assert one.text(4096, 9) == "four byt"
        other.write_text(4096, 9, "e")
        assert one.text(4096, 9) == "e"
        other.close()


def test_digests_differ_where_words_do() -> None:
    assert digest_of("a") == digest_of("a")
    found = {digest_of(str(number)) for number in range(100)}
    assert len(found) == 100
    assert max(found) < 2**64


def test_memory_for_another_world_is_refused_and_nothing_is_left() -> None:
    with nothing_left():
        descriptor = create_segment(3)
        with pytest.raises(HeddleError, match="one for 2 ranks of this version begins with"):
            Segment(descriptor, 2)
        os.close(descriptor)
