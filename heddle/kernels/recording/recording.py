"""A pass that was computed once, to be computed again on the same memory without its Python.

While a recording is entered, everything runs as usual and is noted in order:

    a kernel launched       its words; neighbours run as one launch, threads meeting after each
    an operation of torch   the call, and where its result lies
    `as_one_call`           a function that is called as a whole, such as a collective

A later pass of the same shapes copies what differs into the memory that the first one read, and
runs the notes. Memory that the pass has let go of is used again within it, as an allocator would,
and belongs to the recording from then on.

What cannot be repeated is refused, and the pass counts for itself alone: Python has looked at
numbers (`item`, `tolist`), has made a tensor of its own, or a shape depends on numbers. What a pass
reads besides its inputs has to stay where it is: weights and caches do.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from heddle.kernels.recording.sequence import LaunchSequence
from heddle.kernels.threads import watched_by

_LOOKS = (
    "aten::lift_fresh",
    "aten::resolve_conj",
    "aten::resolve_neg",
    "aten::is_nonzero",
    "aten::allclose",
)
"""A tensor made from numbers of Python, what `tolist` and `numpy` begin with, and truths."""
_ALLOCATIONS = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty")
_DEPENDS = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


class Follower(Protocol):
    """Memory that kernels find by its address, and that can take over what another one says."""

    def follow(self, other: Any) -> None:
        """Say what `other`, of the same type, says; it outlives the next repetition."""
        ...


Input = torch.Tensor | Follower


class Recording(TorchDispatchMode):
    """Notes what a pass does; see the top.

    Args:
        inputs: everything that the pass reads and that the next one has anew.
        num_threads: of a launch of several kernels.
    """

    def __init__(self, inputs: Sequence[Input], num_threads: int) -> None:
        super().__init__()
        self.inputs = tuple(inputs)
        self.refusal: str | None = None
        """Why the pass cannot be repeated; None: it can."""
        self._num_threads = num_threads
        self._steps: list[Callable[[], None]] = []
        self._launches = LaunchSequence(num_threads)
        self._memory: list[torch.Tensor] = []
        self._output: torch.Tensor | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else entering the mode loads torch's compiler, 150 MB of it."""
        return False

    def record(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Compute, and note."""
        with self, watched_by(self.note_launch), _entered(self):
            self._output = compute()
        self._close_launches()
        return self._output

    def repeat(self, inputs: Sequence[Input]) -> torch.Tensor:
        """The result for other inputs, good until the next repetition.

        Args:
            inputs: as many as were recorded, of the same shapes.
        """
        assert self.refusal is None, "a refused pass is never repeated"
        assert self._output is not None, "recorded before"
        for kept, new in zip(self.inputs, inputs, strict=True):
            if isinstance(kept, torch.Tensor):
                assert isinstance(new, torch.Tensor), "inputs of a key are alike"
                kept.copy_(new)
            else:
                kept.follow(new)
        for step in self._steps:
            step()
        return self._output

    @property
    def memory(self) -> tuple[torch.Tensor, ...]:
        """What repetitions compute in; they read nothing of it that they have not written."""
        return tuple(self._memory)

    @property
    def num_bytes(self) -> int:
        """Of that memory."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._memory)

    def refuse(self, reason: str) -> None:
        """The pass cannot be repeated."""
        self.refusal = self.refusal or reason

    def note_launch(self, address: int, words: array[int], *, is_repeatable: bool) -> None:
        """A kernel was launched."""
        if is_repeatable:
            self._launches.add(address, words)
        else:
            self.refuse("a kernel whose words hold for one launch only")

    def note_call(self, function: Callable[..., torch.Tensor], *given: Any) -> torch.Tensor:
        """Call a function of which only the result is noted."""
        with (
            torch.utils._python_dispatch._disable_current_modes(),
            _entered(None),
            watched_by(None),
        ):
            result = function(*given)
        self._add_step(_Repeated(function, given, {}, result))
        return result

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """One operation of torch."""
        given = kwargs or {}
        name = func._schema.name
        if name in _ALLOCATIONS:
            return self._allocate(func, args, given)
        if name in _LOOKS or any(tag in func.tags for tag in _DEPENDS):
            self.refuse(f"{name} makes a pass depend on numbers")
        result = func(*args, **given)
        if func._schema.is_mutable:
            self._add_step(lambda: func(*args, **given))
        elif not _is_view(result, (*args, *given.values())):
            self._add_step(_Repeated(func, args, given, result))
        return result

    def _allocate(self, func: Any, args: Any, given: Any) -> torch.Tensor:
        """Memory of the recording; what nobody refers to any longer is handed out again."""
        with torch.utils._python_dispatch._disable_current_modes():
            shape = func(*args, **{**given, "device": "meta"})
        for kept in self._memory:
            same = kept.shape == shape.shape and kept.dtype is shape.dtype
            if same and kept.stride() == shape.stride() and _num_users(kept) == 1:
                return kept.view(kept.shape)
        tensor: torch.Tensor = func(*args, **given)
        self._memory.append(tensor)
        return tensor.view(tensor.shape)

    def _add_step(self, step: Callable[[], None]) -> None:
        self._close_launches()
        self._steps.append(step)

    def _close_launches(self) -> None:
        if self._launches:
            self._steps.append(self._launches.run)
            self._launches = LaunchSequence(self._num_threads)


class _Repeated:
    """A function that gives fresh tensors, called again: its results go where the first went."""

    def __init__(self, function: Callable[..., Any], args: Any, given: Any, result: Any) -> None:
        self._call = lambda: function(*args, **given)
        self._results = _tensors(result)

    def __call__(self) -> None:
        for kept, new in zip(self._results, _tensors(self._call()), strict=True):
            kept.copy_(new)


def as_one_call(method: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Decorates a function that a recording calls again instead of looking inside."""

    def noted(*given: Any) -> torch.Tensor:
        recording = getattr(_thread, "recording", None)
        return method(*given) if recording is None else recording.note_call(method, *given)

    noted.__doc__ = method.__doc__
    return noted


def never_repeated(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function that no recording may contain."""

    def noted(*given: Any) -> Any:
        recording = getattr(_thread, "recording", None)
        if recording is not None:
            recording.refuse(method.__name__)
        return method(*given)

    noted.__doc__ = method.__doc__
    return noted


_thread = threading.local()


@contextmanager
def _entered(recording: Recording | None) -> Iterator[None]:
    before = getattr(_thread, "recording", None)
    _thread.recording = recording
    try:
        yield
    finally:
        _thread.recording = before


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)]


def _storages(values: Any) -> set[int]:
    found = set()
    for value in values:
        if isinstance(value, torch.Tensor):
            found.add(value.untyped_storage()._cdata)
        elif isinstance(value, list | tuple):
            found |= _storages(value)
    return found


def _is_view(result: Any, given: Any) -> bool:
    return _storages([result]) <= _storages(given)


def _num_users(tensor: torch.Tensor) -> int:
    """Tensors and others that hold the memory of a tensor."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1
