"""What kernels in numba are written with: entry points, memory by address, shares of the work.

A kernel is an *entry*, a C function that `heddle.kernels.threads.launch` calls in every thread with
the address of some 64-bit words: addresses of tensors, sizes, settings. It makes arrays of them and
calls plain numba functions. Nothing is checked here: a wrapper in Python has looked at shapes,
types and strides before.

    @entry
    def scale(address):
        words = given(address, 3)
        first, end = share(words[1], thread_index(), num_threads())
        ...

The object code is kept on disk, under a digest of the sources of an operation, see `object_cache`.

Sums may be taken in another order and multiply-adds fused, but infinities and NaN stay what they
are: empty states hold `-inf`.
"""

from __future__ import annotations

import logging
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from heddle.kernels.object_cache import object_folder, operation_of
from heddle.kernels.threads import symbols
from heddle.kernels.vectors import EXP_FLOOR, EXP_SERIES, LN_2_HIGH, LN_2_LOW, LOG2_E

_log = logging.getLogger(__name__)
FAST = frozenset({"contract", "reassoc", "nsz", "arcp"})
"""Freedoms of the compiler that no infinity or NaN can notice."""

for _name, _where in symbols().items():
    llvmlite.binding.add_symbol(f"heddle_{_name}", _where)

thread_index = types.ExternalFunction("heddle_omp_get_thread_num", types.int32())
"""Number of the calling thread in its team."""
num_threads = types.ExternalFunction("heddle_omp_get_num_threads", types.int32())
"""Threads of the team."""
barrier = types.ExternalFunction("heddle_GOMP_barrier", types.void())
"""Wait for all threads of the team."""

inner = numba.njit(fastmath=set(FAST), error_model="numpy", boundscheck=False)
"""Decorates a function that entries call."""


@contextmanager
def _cache_folder(module: str) -> Iterator[None]:
    """Object code goes to a folder of this version of the sources.

    Raises:
        OSError: nothing can be put there. Numba would keep it beside the sources instead, where a
            change in what they import is not noticed, and others may write.
    """
    before = numba.config.CACHE_DIR
    folder = object_folder(operation_of(module))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
    numba.config.CACHE_DIR = str(folder)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


def entry(function: Callable[[int], None]) -> int:
    """Compile an entry, or find it compiled; its address."""
    try:
        with _cache_folder(function.__module__):
            compiled = _compile(function, is_kept=True)
    except OSError as error:  # of a disk that is full, or that we may not write to
        _say_not_kept(str(error))
        compiled = _compile(function, is_kept=False)
    _KEPT.append(compiled)
    return int(compiled.address)


def _compile(function: Callable[[int], None], *, is_kept: bool) -> Any:
    return numba.cfunc(
        types.void(types.voidptr), cache=is_kept, fastmath=set(FAST), error_model="numpy"
    )(function)


@cache
def _say_not_kept(reason: str) -> None:
    _log.warning(
        "compiled kernels cannot be kept (%s): every start compiles them anew, which takes "
        "minutes; make room there, or set XDG_CACHE_HOME to a folder that has some",
        reason,
    )


_KEPT: list[Any] = []
"""Compiled code must outlive the addresses that were handed out."""


@intrinsic  # type: ignore[untyped-decorator]
def pointer(typing: Any, address: Any) -> Any:  # noqa: ARG001 - numba's protocol
    """An address, a 64-bit word, as a pointer for `numba.carray`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def as_real(typing: Any, word: Any) -> Any:  # noqa: ARG001
    """The float64 that a word holds, see `real_word`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def bits_as_float(typing: Any, bits: Any) -> Any:  # noqa: ARG001
    """The float32 of 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


def real_word(value: float) -> int:
    """A float64 as a word."""
    word: int = struct.unpack("q", struct.pack("d", value))[0]
    return word


@inner
def given(address, count):
    """The words that an entry was launched with."""
    return numba.carray(address, (count,), np.int64)


@inner
def share(count, index, parts):
    """[first, end) of `count` things for one of `parts`; shares differ by at most one."""
    return count * index // parts, count * (index + 1) // parts


_FLOOR, _LOG2_E = np.float32(EXP_FLOOR), np.float32(LOG2_E)
_HIGH, _LOW = np.float32(LN_2_HIGH), np.float32(LN_2_LOW)
_P0, _P1, _P2, _P3, _P4, _P5 = (np.float32(value) for value in EXP_SERIES)


@inner
def exp(x):
    """e^x of a float32 x <= 88, within 2 units in the last place; 0 below -87, NaN of NaN.

    e^x = 2^n e^r with |r| <= ln 2 / 2, and a polynomial for e^r.
    """
    bounded = _FLOOR if x < _FLOOR else x
    n = np.floor(bounded * _LOG2_E + np.float32(0.5))
    r = bounded - n * _HIGH - n * _LOW
    p = ((((_P0 * r + _P1) * r + _P2) * r + _P3) * r + _P4) * r + _P5
    power = bits_as_float(np.int32((np.int32(n) + 127) << 23))
    return np.float32(0.0) if x < _FLOOR else (p * r * r + r + np.float32(1.0)) * power
