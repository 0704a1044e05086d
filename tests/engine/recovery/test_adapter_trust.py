from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from heddle.engine.recovery.adapter_trust import AdapterTrust
from heddle.step.batch import AdapterChange

A, B = AdapterChange(slot=1, path="/a"), AdapterChange(slot=1, path="/b")
OUT = AdapterChange(slot=1, path=None)


def test_what_was_there_from_the_start_is_trusted() -> None:
    trust = AdapterTrust(2)
    trust.note_fault(0)
    assert trust.is_proven(1)
    assert trust.faults_of(1) == frozenset()


@given(st.integers(1, 4), st.lists(st.integers(0, 3), max_size=8))
def test_it_is_proven_once_every_replica_has_taken_it_in(
    num_replicas: int, replicas: list[int]
) -> None:
    trust = AdapterTrust(num_replicas)
    trust.note_change(A)
    for replica in replicas:
        trust.note_taken(A, replica % num_replicas)
    assert trust.is_proven(1) == (
        {each % num_replicas for each in replicas} == {*range(num_replicas)}
    )


def test_a_step_that_brought_another_one_proves_nothing() -> None:
    trust = AdapterTrust(1)
    trust.note_change(A)
    trust.note_change(OUT)
    trust.note_change(B)
    trust.note_taken(A, 0)
    trust.note_taken(OUT, 0)
    assert not trust.is_proven(1)
    trust.note_taken(B, 0)
    assert trust.is_proven(1)


def test_faults_count_from_its_loading_to_its_proof() -> None:
    trust = AdapterTrust(1)
    trust.note_fault(0)
    trust.note_change(A)
    trust.note_fault(1)
    trust.note_fault(2)
    assert trust.faults_of(1) == {1, 2}
    trust.note_taken(A, 0)
    trust.note_fault(3)
    assert trust.faults_of(1) == frozenset()
    trust.note_change(B)
    assert trust.faults_of(1) == frozenset()


def test_a_slot_that_is_empty_is_nobodys() -> None:
    trust = AdapterTrust(1)
    trust.note_change(A)
    trust.note_change(OUT)
    assert trust.is_proven(1)
