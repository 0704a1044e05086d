"""A pass that was computed once, to be computed again on the same memory without its Python.

While a recording is entered, everything runs as usual and is noted in order:

    a kernel launched       its words; neighbours run as one launch, threads meeting after each
    an operation of torch   the call, and where its result lies
    `as_one_call`           a function that is called as a whole, such as a collective

A later pass of the same shapes copies what differs into the memory that the first one read, and
runs the notes. Memory that the pass has let go of is used again within it, as an allocator would,
and belongs to the recording from then on.

What cannot be repeated is refused, and the pass counts for itself alone: Python has looked at
numbers (`item`, `tolist`), has made a tensor of its own, or a shape depends on numbers. Memory that
is taken over, as by `torch.frombuffer`, is not seen. What a pass reads besides its inputs has to
stay where it is: weights and caches do.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from heddle.kernels.recording.inputs import Input, take_over
from heddle.kernels.recording.noting import noted_by
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


def depends_on_numbers(func: Any) -> bool:
    """An operation of torch that takes numbers to Python, or from it, or to a shape."""
    return func._schema.name in _LOOKS or any(tag in func.tags for tag in _DEPENDS)


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
        self._steps: list[Callable[[], object]] = []
        self._launches = LaunchSequence(num_threads)
        self._memory: list[torch.Tensor] = []
        self._num_held: Counter[int] = Counter()
        """Per storage, tensors that only notes hold."""
        self._output: torch.Tensor | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else entering the mode loads torch's compiler, 150 MB of it."""
        return False

    def record(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Compute, and note; in inference mode, where every call of torch is seen."""
        assert torch.is_inference_mode_enabled(), "else a look at numbers may go unseen"
        with self.noting(), noted_by(self):
            self._output = compute()
        return self._output

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what this thread launches and asks of torch."""
        with self, watched_by(self.note_launch):
            yield
        self._close_launches()

    def repeat(self, inputs: Sequence[Input]) -> torch.Tensor:
        """The result for other inputs, good until the next repetition.

        Args:
            inputs: as many as were recorded, of the same shapes.
        """
        assert self.refusal is None, "a refused pass is never repeated"
        assert self._output is not None, "recorded before"
        take_over(self.inputs, inputs)
        self.replay()
        return self._output

    def replay(self) -> None:
        """Do what was noted, on the memory as it is."""
        for step in self._steps:
            step()

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
        with _disable_current_modes(), noted_by(None), watched_by(None):
            result: torch.Tensor = self._note(function, given, {}, function(*given))
            return result

    def note_host_call(self, call: Callable[[], object]) -> None:
        """A call that the host makes in every pass."""
        self._add_step(call)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation of torch."""
        given = kwargs or {}
        name = func._schema.name
        if name in _ALLOCATIONS:
            return self._allocate(func, args, given)
        if depends_on_numbers(func):
            self.refuse(f"{name} makes a pass depend on numbers")
        result = func(*args, **given)
        if self.refusal is not None:
            return result
        is_view = storages([result]) <= storages((*args, *given.values()))
        if not func._schema.is_mutable:
            return result if is_view else self._note(func, args, given, result)
        if not is_view:
            self.refuse(f"{name} changes a tensor and returns another")
        held, options = self._held(args), self._held(given)
        self._add_step(lambda: func(*held, **options))
        return result

    def _note(self, function: Callable[..., Any], args: Any, given: Any, result: Any) -> Any:
        """Note a function whose results are fresh; they move to memory of the recording."""
        kept = _mapped(self._moved, result)
        held, options, targets = self._held(args), self._held(given), tensors(self._held(kept))

        def repeat() -> None:
            for target, new in zip(targets, tensors(function(*held, **options)), strict=True):
                target.copy_(new)

        self._add_step(repeat)
        return kept

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._allocate(torch.empty_like, (tensor,), {}).copy_(tensor)

    def _held(self, values: Any) -> Any:
        """The same memory by tensors of our own, which do not count as users of it: notes are run
        in the order in which they were made.
        """

        def hold(tensor: torch.Tensor) -> torch.Tensor:
            own = torch.ops.aten.alias.default(tensor)
            self._num_held[own.untyped_storage()._cdata] += 1
            return own

        return _mapped(hold, values)

    def _allocate(self, func: Any, args: Any, given: Any) -> torch.Tensor:
        """Memory of the recording; what nobody refers to any longer is handed out again."""
        with _disable_current_modes():
            wanted = func(*args, **{**given, "device": "meta"})
        for kept in self._memory:
            same = kept.shape == wanted.shape and kept.dtype is wanted.dtype
            if same and kept.stride() == wanted.stride() and not self._is_used(kept):
                return kept.view(kept.shape)
        tensor: torch.Tensor = func(*args, **given)
        self._memory.append(tensor)
        return tensor.view(tensor.shape)

    def _is_used(self, tensor: torch.Tensor) -> bool:
        """Somebody besides the recording holds the memory of a tensor."""
        storage = tensor.untyped_storage()
        # This line's own handle, and the tensor itself.
        users = torch._C._storage_Use_Count(storage._cdata) - 2
        return bool(users > self._num_held[storage._cdata])

    def _add_step(self, step: Callable[[], object]) -> None:
        self._close_launches()
        self._steps.append(step)

    def _close_launches(self) -> None:
        if self._launches:
            self._steps.append(self._launches.run)
            self._launches = LaunchSequence(self._num_threads)


def tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor of nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors(item)]


def _mapped(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Every tensor of nested lists, tuples and dictionaries replaced."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(function, item) for item in value)
    if isinstance(value, dict):
        return {name: _mapped(function, item) for name, item in value.items()}
    return value


def storages(values: Any) -> set[int]:
    """Of every tensor in nested lists and tuples."""
    found = set()
    for value in values:
        if isinstance(value, torch.Tensor):
            found.add(value.untyped_storage()._cdata)
        elif isinstance(value, list | tuple):
            found |= storages(value)
    return found
