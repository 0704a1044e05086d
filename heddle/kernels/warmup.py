"""Compiles the kernels that an engine will use, before it says that it is ready.

    python -m heddle.kernels.warmup OPERATION ...    one line for each that is compiled

A driver whose ranks are other processes loads no compiler; it starts this program instead. Ranks
then find everything on disk.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from importlib import import_module

from heddle.kernels.object_cache import is_cold
from heddle.kernels.stale_objects import stamp

LAYERS = (
    "linear",
    "rms_norm",
    "silu_mul",
    "rotate",
    "row_encode",
    "cache_write",
    "state_merge",
    "state_pack",
)
"""Operations with a compiled form that every model uses; each has a folder in this room."""
REPEATING = "recording"
"""What runs kernels one after another, where layers have a compiled form."""
ATTENTION = ("paged_decode", "tiled_attention")
"""Those of the attention backend `numba`."""
_WITHOUT_FORM = ("float32", "float64")
"""Cache types that need nothing more: compiled with the operation, or left to its reference."""
OnLine = Callable[[str], None]


def operations(kernels: str, backend: str, kv_cache_dtype: str = "float32") -> tuple[str, ...]:
    """What a rank compiles.

    Args:
        kernels: of the resolved configuration.
        backend: of the resolved configuration.
        kv_cache_dtype: of the resolved configuration; one operation has an entry for each.

    Example:
        >>> operations("torch", "numba", "int8")
        ('paged_decode', 'tiled_attention', 'paged_decode.int8')
    """
    layers = (*LAYERS, REPEATING) if kernels == "numba" else ()
    if backend != "numba":
        return layers
    form = () if kv_cache_dtype in _WITHOUT_FORM else (f"paged_decode.{kv_cache_dtype}",)
    return layers + ATTENTION + form


def compile_here(names: Iterable[str], on_line: OnLine) -> list[str]:
    """Compile what is not on disk yet, in this process.

    Args:
        names: of operations.
        on_line: told what is compiled next.

    Returns:
        The operations that were compiled.
    """
    names = list(names)
    stamp(names)
    cold = [name for name in names if is_cold(name)]
    for place, name in enumerate(cold, 1):
        on_line(f"compiling kernels {place}/{len(cold)} {name}")
        _compile(name)
    return cold


def _compile(name: str) -> None:
    operation, _, form = name.partition(".")
    import_module(f"heddle.kernels.{operation}.numba_cpu")
    if form:
        import_module(f"heddle.kernels.{operation}.kernel").entry_of(form)


def compile_elsewhere(names: Iterable[str], on_line: OnLine) -> None:
    """The same in a process of its own, if there is anything to do.

    A failure there is none here: ranks compile what they miss.
    """
    names = list(names)
    stamp(names)
    cold = [name for name in names if is_cold(name)]
    if not cold:
        return
    command = [sys.executable, "-m", "heddle.kernels.warmup", *cold]
    with subprocess.Popen(  # noqa: S603 - the interpreter, with our own words
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            on_line(line.rstrip())


def _end_with_parent() -> None:
    """Compiling takes minutes; nobody waits for it once the other end of stdin is gone."""

    def watch() -> None:
        os.read(0, 1)  # a buffer's lock, held for good, would break the end of the interpreter
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _main() -> None:
    def say(line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    _end_with_parent()
    compile_here(sys.argv[1:], say)


if __name__ == "__main__":
    _main()
