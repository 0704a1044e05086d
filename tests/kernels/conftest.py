"""Where Triton's kernels run in the tests: interpreted on the CPU, or compiled on a device.

One process does one of the two, as triton decides when it is first imported: the default suite
interprets, and `TRITON_INTERPRET=0 pytest -m gpu tests` runs the same laws on a device.
"""

from __future__ import annotations

import pytest
import torch

PLACES = ["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=PLACES)
def device(request):
    """The device of a law's tensors."""
    from heddle.kernels.triton_math import is_interpreted

    if request.param == "interpreter":
        assert is_interpreted(), "triton was imported with TRITON_INTERPRET=0; select -m gpu"
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert not is_interpreted(), "triton interprets; set TRITON_INTERPRET=0"
    return torch.device("cuda")
