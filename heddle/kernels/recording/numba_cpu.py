"""Runs kernels one after another in the threads of one team."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from heddle.kernels.compiled import barrier, entry, given, pointer


@intrinsic  # type: ignore[untyped-decorator]
def _call(typing: Any, address: Any, words: Any) -> Any:  # noqa: ARG001 - numba's protocol
    """Call the entry at an address with the address of its words."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        kernel = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t])
        target = builder.inttoptr(arguments[0], kernel.as_pointer())
        builder.call(target, [builder.inttoptr(arguments[1], cgutils.voidptr_t)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@entry
def run_sequence(address):
    """Words: number of calls, and where they are: entry and words of each."""
    w = given(address, 2)
    calls = numba.carray(pointer(w[1]), (w[0], 2), np.int64)
    for i in range(w[0]):
        _call(calls[i, 0], calls[i, 1])
        barrier()
