"""The threads in which kernels run: those of torch itself.

A second pool beside torch's would fight with it for the cores: for some time after its last work
an OpenMP thread waits by spinning. So a kernel is a C function that the OpenMP runtime of torch
calls once per thread, through its public entry point:

    void GOMP_parallel(void (*kernel)(void *), void *words, unsigned num_threads, unsigned flags)

The GNU runtime has it, and so have those of LLVM and Intel. Where none is loaded a kernel runs in
the calling thread alone.

Source: the libgomp ABI, https://gcc.gnu.org/onlinedocs/libgomp/Implementing-PARALLEL-Construct.html
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Protocol

import torch  # noqa: F401 - loads the runtime that is looked for

_RUNTIMES = ("libgomp", "libiomp5", "libomp")
_SYMBOLS = ("omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier")


class OnLaunch(Protocol):
    """Told of the launches of a thread of Python."""

    def __call__(self, address: int, words: array[int], *, is_repeatable: bool) -> None: ...  # noqa: D102


def launch(
    address: int, words: array[int], num_threads: int, *, is_repeatable: bool = True
) -> None:
    """Run a kernel once in each of some threads; returns when all have ended.

    The lock of the interpreter is not held meanwhile. The team may come out smaller than asked for;
    a kernel asks how many there are.

    Args:
        address: of a C function `void(void *)`.
        words: what it is given, 64 bits each.
        num_threads: at least 1.
        is_repeatable: the words hold for another launch as well, as long as the memory that they
            point to is kept and its owner says what has changed.
    """
    on_launch = getattr(_thread, "on_launch", None)
    if on_launch is not None:
        on_launch(address, words, is_repeatable=is_repeatable)
    if num_threads == 1:
        _direct(address)(words.buffer_info()[0])
    else:
        _parallel()(address, words.buffer_info()[0], num_threads, 0)


@contextmanager
def watched_by(on_launch: OnLaunch | None) -> Iterator[None]:
    """Tell somebody of this thread's launches; None: nobody."""
    before = getattr(_thread, "on_launch", None)
    _thread.on_launch = on_launch
    try:
        yield
    finally:
        _thread.on_launch = before


_thread = threading.local()


@cache
def runtime() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch has loaded; None: there is none that kernels can use."""
    for path in _loaded_libraries():
        if Path(path).name.startswith(_RUNTIMES):
            library = ctypes.CDLL(path)
            if all(hasattr(library, name) for name in ("GOMP_parallel", *_SYMBOLS)):
                return library
    return None


def symbols() -> dict[str, int]:
    """Addresses of what a kernel asks the runtime: which thread am I, how many are we, wait."""
    library = runtime()
    if library is None:
        return {name: _address(function) for name, function in _ALONE.items()}
    return {name: _address(getattr(library, name)) for name in _SYMBOLS}


@cache
def _parallel() -> ctypes._CFuncPtr | ctypes._FuncPointer:  # type: ignore[name-defined]
    library = runtime()
    if library is None:
        return _call_alone
    parallel = library.GOMP_parallel
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


def _call_alone(address: int, words: int, num_threads: int, flags: int) -> None:  # noqa: ARG001
    _direct(address)(words)


@cache
def _direct(address: int) -> ctypes._CFuncPtr | ctypes._FuncPointer:  # type: ignore[name-defined]
    """An entry as a function: outside of a team a thread is alone in its own."""
    return _KERNEL(address)


def _loaded_libraries() -> list[str]:
    """Paths of the libraries in this process, where the system tells."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    return [line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "/" in line]


def _address(function: ctypes._CFuncPtr) -> int:  # type: ignore[name-defined]
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_NUMBER = ctypes.PYFUNCTYPE(ctypes.c_int)
_ALONE = {
    "omp_get_thread_num": _NUMBER(lambda: 0),
    "omp_get_num_threads": _NUMBER(lambda: 1),
    "GOMP_barrier": _NUMBER(lambda: 0),
}
