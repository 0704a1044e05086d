"""Finds the quantised tensors of a checkpoint.

method               parts of a tensor                               read by
fp8, fbgemm_fp8      8-bit floats and their scales                   scaled
compressed-tensors   8-bit numbers, or packed integers, and scales   scaled, packed
awq, gptq            packed integers, stored `[in, out]`, in groups  grouped
mxfp4                experts in 4-bit floats                         fp4

The files decide: a tensor is quantised if its parts are there.
"""

from __future__ import annotations

from collections.abc import Callable

from heddle.models.config_quantization import Quantization
from heddle.models.weights.dequantized import DequantizedSource, StoredTensor
from heddle.models.weights.fp4 import find_fp4_experts
from heddle.models.weights.grouped import find_awq, find_gptq
from heddle.models.weights.packed import find_packed
from heddle.models.weights.scaled import find_scaled
from heddle.models.weights.source import StoredSource

Find = Callable[[StoredSource, Quantization], dict[str, StoredTensor]]

_FINDERS: dict[str, tuple[Find, ...]] = {
    "fp8": (find_scaled,),
    "fbgemm_fp8": (find_scaled,),
    "compressed-tensors": (find_scaled, find_packed),
    "awq": (find_awq,),
    "gptq": (find_gptq,),
    "mxfp4": (find_fp4_experts,),
}


def dequantize(source: StoredSource, quantization: Quantization) -> DequantizedSource:
    """Show the quantised tensors of `source` as plain ones.

    Raises:
        ModelFileError: a part is missing, or has another shape or dtype; names file and tensor.
    """
    tensors: dict[str, StoredTensor] = {}
    for find in _FINDERS[quantization.method]:
        tensors |= find(source, quantization)
    return DequantizedSource(source, tensors)
