"""Loads models in a process of its own and tells how much memory that took.

    python -m tests.support.load_peak DTYPE PATH...

Prints a JSON list with one object per path: bytes kept in parameters, and the most memory that was
in use after any read, less what was in use before: the process's own pages, and pages of the mapped
weights. Pages of libraries are left out; they come and go with the load of the machine.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import warnings
from pathlib import Path

import torch

# All that loading imports on demand, so that it is not taken for memory of a model.
import heddle.models.llama
import heddle.models.weights.gguf_source
import heddle.models.weights.quantized
import heddle.models.weights.safetensors_source  # noqa: F401
from heddle.comm.solo import SoloCommunicator
from heddle.models.config_json import load_model_config
from heddle.models.registry import create_model
from heddle.models.weights.open import open_weights
from heddle.models.weights.source import Span, WeightSource
from tests.support.checkpoints import CPU, CountingSource, head_layout
from tests.support.processes import own_bytes


class WatchedSource(CountingSource):
    """A `WeightSource` that looks at the memory in use after every read."""

    def __init__(self, source: WeightSource, path: Path) -> None:
        super().__init__(source)
        self._path = path
        self.peak_bytes = 0
        self._num_reads = 0
        self._mapped_bytes = 0

    def read(
        self,
        name: str,
        rows: Span | None = None,
        cols: Span | None = None,
        depth: Span | None = None,
    ) -> torch.Tensor:
        part = super().read(name, rows, cols, depth)
        part.sum()  # pages of a view are not in memory before they are touched
        self.look()
        return part

    def look(self) -> None:
        if self._num_reads % 32 == 0:  # the kernel walks all pages of the process: slow
            self._mapped_bytes = max(self._mapped_bytes, mapped_bytes(self._path))
        self._num_reads += 1
        self.peak_bytes = max(self.peak_bytes, own_bytes() + self._mapped_bytes)


def mapped_bytes(path: Path) -> int:
    """Pages in memory of files at or below a path."""
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *words = line.split()
        if not key.endswith(":"):
            is_ours = bool(words) and words[-1].startswith(str(path))
        elif is_ours and key == "Rss:":
            total += int(words[0]) * 1024
    return total


def measure(path: Path, dtype: torch.dtype) -> dict[str, int]:
    """Load one model on one rank, and let go of it."""
    config = load_model_config(path)
    before = _storages()
    ctypes.CDLL(None).malloc_trim(0)  # else what is free now would be used, and not be seen
    start = own_bytes()
    source = WatchedSource(open_weights(path), path)
    model = create_model(config, head_layout(config), 0, source, dtype, CPU, SoloCommunicator())
    source.look()
    peak = source.peak_bytes - start
    del source
    kept = sum(size for pointer, size in _storages().items() if pointer not in before)
    del model
    return {"kept_bytes": kept, "peak_bytes": peak}


def _storages() -> dict[int, int]:
    """Bytes of the memory of all tensors alive, by address."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # looking at old names of a library wakes warnings
        found = [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in found]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def main() -> None:
    dtype = getattr(torch, sys.argv[1])
    print(json.dumps([measure(Path(path), dtype) for path in sys.argv[2:]]))


if __name__ == "__main__":
    main()
