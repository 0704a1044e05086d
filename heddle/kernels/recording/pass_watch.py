"""Looks on while a pass is computed: may it be captured, and does it read what nobody named?

A graph reads the same addresses in every replay. So a pass may read its inputs, which are copied to
where the captured ones lie, what it has made itself, and memory that stays where it is: weights and
caches. Of the latter two passes read the same. Memory that only one of them reads was made for it,
and is an input that was forgotten; captured, it would be read again in each replay, stale.

Kernels that torch does not launch, as Triton's, are not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from heddle.kernels.recording.inputs import Input
from heddle.kernels.recording.noting import noted_by
from heddle.kernels.recording.recording import depends_on_numbers


class PassWatch(TorchDispatchMode):
    """Watches one pass.

    Args:
        inputs: everything that the pass reads and that the next one has anew.
    """

    def __init__(self, inputs: Sequence[Input]) -> None:
        super().__init__()
        self.refusal: str | None = None
        """Why the pass cannot be captured; None: nothing was seen that stands in the way."""
        self._outside: dict[int, torch.Tensor] = {}
        """Address -> memory that was read, neither given nor made here; held, so that no other can
        have its address.
        """
        self._known = set(_addresses(inputs))
        self._held: list[torch.Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else entering the mode loads torch's compiler, 150 MB of it."""
        return False

    def watch(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Compute; in inference mode, where every call of torch is seen."""
        assert torch.is_inference_mode_enabled(), "else a look at numbers may go unseen"
        with self, noted_by(self):
            result = compute()
        self._held.clear()
        return result

    def forgotten(self, before: PassWatch) -> str | None:
        """Memory that this pass read and an earlier one of the same looks did not, in words."""
        found = [
            tensor for address, tensor in self._outside.items() if address not in before._outside
        ]
        if not found:
            return None
        what = ", ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in found)
        return f"reads memory of its own step that is no input: {what}"

    def refuse(self, reason: str) -> None:
        """See `Notes.refuse`."""
        self.refusal = self.refusal or reason

    def note_call(self, function: Callable[..., torch.Tensor], *given: Any) -> torch.Tensor:
        """See `Notes.note_call`."""
        self._note_reads(given)
        with _disable_current_modes(), noted_by(None):
            result: torch.Tensor = function(*given)
        self._note_made(result)
        return result

    def note_host_call(self, call: Callable[[], object]) -> None:
        """See `Notes.note_host_call`; it is nobody's reading."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation of torch."""
        given = kwargs or {}
        if depends_on_numbers(func):
            self.refuse(f"{func._schema.name} makes a pass depend on numbers")
        self._note_reads((args, given))
        result = func(*args, **given)
        self._note_made(result)
        return result

    def _note_reads(self, values: Any) -> None:
        for tensor in _tensors(values):
            address = tensor.untyped_storage().data_ptr()
            if address and address not in self._known:
                self._outside.setdefault(address, tensor)

    def _note_made(self, values: Any) -> None:
        """Results that are no views of what was read from outside are the pass's own."""
        for tensor in _tensors(values):
            address = tensor.untyped_storage().data_ptr()
            if address not in self._outside:
                self._known.add(address)
                self._held.append(tensor)


def _addresses(values: Any) -> Iterator[int]:
    return (tensor.untyped_storage().data_ptr() for tensor in _tensors(values))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor of nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
