"""What surrounds the kernel: views, splits, and what is refused."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from heddle.errors import UnsupportedError
from heddle.layout.cache_rows import RowFormat
from tests.kernels.paged_decode.paged_inputs import GQA, check, make_case, run


def test_results_are_bit_equal_from_run_to_run_and_with_other_rows_beside(device):
    case = make_case([20, 40, 13], head_map="even", block_size=4)
    out, lse = run(case, device, num_splits=3)
    again = run(case, device, num_splits=3)
    assert torch.equal(out, again[0])
    assert torch.equal(lse, again[1])
    plan = dataclasses.replace(
        case.plan, table_of_row=case.plan.table_of_row[1:2], first=np.zeros(1), end=np.array([40])
    )
    alone = dataclasses.replace(case, plan=plan, query=case.query[1:2])
    assert torch.equal(run(alone, device, num_splits=3)[0][0], out[1])


def test_views_of_queries_and_of_pools_are_read_where_they_lie(device):
    from heddle.kernels.paged_decode import triton_gpu

    case = make_case([20, 7], head_map="even")
    query, rows, *others = case.arguments(device)
    holes = torch.full((len(rows), 3, 40), math.nan, device=device)
    holes[:, :2, :32] = rows
    wide = query.transpose(0, 1).contiguous().transpose(0, 1)
    found = triton_gpu.paged_decode(wide, holes[:, :2, :32], *others)
    check(case, tuple(part.cpu() for part in found))


def test_what_cannot_be_attended_is_told_in_words():
    from heddle.kernels.paged_decode.triton_gpu import unsupported_reasons

    ask = (torch.float64, torch.int32, GQA)
    assert unsupported_reasons(*ask) == [
        "queries of torch.float64; must be float32, bfloat16 or float16",
        "rows of torch.int32; must be float32, bfloat16, float16 or codes",
    ]
    for parts in [(4, 4, 8, 16), (16, 8, 8), (16, 16, 1)]:
        form = RowFormat("int8", parts)
        reasons = unsupported_reasons(torch.float32, torch.uint8, GQA, form)
        assert [reason.split(" for")[0] for reason in reasons] == [f"codes in parts {parts}"]
    assert unsupported_reasons(torch.float32, torch.uint8, GQA, RowFormat("int8", (16, 16))) == []
    case = make_case([3])
    with pytest.raises(UnsupportedError, match=r"queries of torch\.float64"):
        run(dataclasses.replace(case, query=case.query.double()), torch.device("cpu"))
