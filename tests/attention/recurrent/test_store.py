"""Slots keep what was written, slot 0 stays zeros, copies are done in order."""

from __future__ import annotations

import pytest
import torch

from heddle.attention.recurrent.store import StateStore
from heddle.config.model import RecurrentConfig
from heddle.layout.recurrent_heads import RecurrentLayout
from heddle.step.batch import StateCopy

CONFIG = RecurrentConfig(
    method="gated_delta",
    num_heads=3,
    num_key_heads=1,
    key_dim=4,
    value_dim=2,
    conv_kernel=4,
    norm_groups=3,
)


def create(dtype: torch.dtype = torch.bfloat16) -> StateStore:
    return StateStore(
        RecurrentLayout(CONFIG, 2),
        1,
        layers=[2, 5],
        num_slots=6,
        dtype=dtype,
        device=torch.device("cpu"),
    )


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def fill(store: StateStore, layer: int, slot: int, number: float) -> None:
    for write, read in (
        (store.write_states, store.states),
        (store.write_histories, store.histories),
    ):
        write(layer, slots(slot), torch.full_like(read(layer, slots(slot)), number))


def numbers(store: StateStore, layer: int) -> list[float]:
    states, rows = store.states(layer, torch.arange(6)), store.histories(layer, torch.arange(6))
    found = [float(state.mean()) for state in states]
    assert found == [float(row.float().mean()) for row in rows]
    return found


@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2],
)
def test_shapes_and_dtypes(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    """Rank 1 of 2 has heads 1 and 2; states are never narrower than float32."""
    store = create(dtype)
    states, rows = store.states(5, slots(0, 0)), store.histories(5, slots(0, 0))
    assert (states.shape, states.dtype) == ((2, 2, 4, 2), state_dtype)
    assert (rows.shape, rows.dtype) == ((2, 3, 2 * 4 + 2 * 2), dtype)
    assert (states == 0).all()
    assert (rows == 0).all()


def test_copies_are_done_in_order_in_every_layer() -> None:
    store = create()
    for layer in (2, 5):
        for slot in range(1, 6):
            fill(store, layer, slot, layer + 8 * slot)
    store.copy(
        [
            StateCopy(source=1, target=2),
            StateCopy(source=2, target=3),
            StateCopy(source=0, target=1),
        ]
    )
    for layer in (2, 5):
        old = layer + 8
        assert numbers(store, layer) == [0, 0, old, old, layer + 32, layer + 40]
    store.wipe([4])
    assert numbers(store, 2) == [0, 0, 10, 10, 0, 42]


def test_slot_0_is_never_a_target() -> None:
    with pytest.raises(AssertionError, match="slot 0 is never written"):
        create().copy([StateCopy(source=1, target=0)])


def test_what_is_read_is_a_copy() -> None:
    store = create()
    fill(store, 2, 3, 7)
    store.states(2, slots(3)).zero_()
    store.histories(2, slots(3)).zero_()
    assert float(store.states(2, slots(3)).mean()) == 7
    assert float(store.histories(2, slots(3)).float().mean()) == 7
