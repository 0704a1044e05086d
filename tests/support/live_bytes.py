"""How many bytes the tensors that a step makes take, at most, beside what its rank keeps anyway."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heddle.runner.worker import RankWorker


class LiveBytes(TorchDispatchMode):
    """Notes every tensor that an operation of this thread makes, and the most that lived at once.

    Args:
        worker: whose weights and pool are left out.
    """

    def __init__(self, worker: RankWorker) -> None:
        super().__init__()
        self.peak_bytes = 0
        kept = [*_tensors(worker.model), *_tensors(worker.store)]
        self._kept = {tensor.untyped_storage().data_ptr() for tensor in kept}
        self._alive: dict[int, tuple[int, list[weakref.ref[torch.Tensor]]]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if not place or place in self._kept:
            return
        _, refs = self._alive.get(place, (0, []))
        self._alive[place] = storage.nbytes(), [*refs, weakref.ref(tensor)]
        for other, (_, views) in list(self._alive.items()):
            if all(view() is None for view in views):
                del self._alive[other]
        self.peak_bytes = max(self.peak_bytes, sum(size for size, _ in self._alive.values()))


def _tensors(root: object) -> Iterator[torch.Tensor]:
    """All that can be reached from an object, classes and modules aside."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, type | ModuleType | FunctionType):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
        else:
            stack.extend(gc.get_referents(item))
