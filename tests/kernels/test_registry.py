from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

from heddle.kernels.registry import create_kernels

FIELDS = [
    field.name
    for field in dataclasses.fields(create_kernels("torch"))
    if field.name not in ("name", "num_threads")
]


@pytest.mark.parametrize("field", FIELDS)
def test_a_compiled_form_takes_what_its_reference_takes(field):
    """And how many threads it may use, which is bound here."""
    plain, bound = (getattr(create_kernels(name, 2), field) for name in ("torch", "numba"))
    assert plain.__module__.endswith("reference")
    compiled = bound.func
    assert compiled.__module__ == plain.__module__.replace("reference", "numba_cpu")
    assert bound.keywords == {"num_threads": 2}
    found = dict(inspect.signature(compiled).parameters)
    found.pop("num_threads")
    expected = inspect.signature(plain).parameters
    assert [(p.name, p.default) for p in found.values()] == [
        (p.name, p.default) for p in expected.values()
    ]


def test_both_forms_compute():
    x = torch.arange(32.0).view(2, 16) / 16
    plain, compiled = (create_kernels(name).silu_mul(x) for name in ("torch", "numba"))
    torch.testing.assert_close(plain, compiled)
