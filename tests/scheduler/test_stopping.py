from __future__ import annotations

import pytest

from heddle.config import SamplingParams
from heddle.layout.kv import KVLayout
from heddle.scheduler.request import Request
from heddle.scheduler.stopping import end_of


def ended(outputs, *, limit=10, **params):
    return end_of(
        Request(
            request_id=0,
            prompt_token_ids=(1, 2),
            params=SamplingParams(**params),
            max_output_tokens=limit,
            kv_layout=KVLayout(1, 1, 4),
            eos_token_ids=(7, 8),
            output_token_ids=list(outputs),
        )
    )


@pytest.mark.parametrize(
    ("outputs", "params", "expected"),
    [
        ([5], {}, None),
        ([7], {}, ("stop", None)),
        ([8], {}, ("stop", None)),
        ([7], {"ignore_eos": True}, None),
        ([9], {"stop_token_ids": (9,)}, ("stop", 9)),
        ([9, 5], {"stop_token_ids": (9,)}, None),
        ([7], {"stop_token_ids": (7,)}, ("stop", 7)),
        ([7], {"stop_token_ids": (7,), "ignore_eos": True}, ("stop", 7)),
        ([5, 7], {"min_tokens": 3}, None),
        ([5, 9], {"min_tokens": 3, "stop_token_ids": (9,)}, None),
        ([5, 5, 7], {"min_tokens": 3}, ("stop", None)),
        ([5, 5], {"limit": 2}, ("length", None)),
        ([5, 7], {"limit": 2}, ("stop", None)),
        ([5, 7], {"limit": 2, "min_tokens": 3}, ("length", None)),
        ([], {"limit": 0}, ("length", None)),
        ([], {"limit": 1}, None),
    ],
)
def test_what_ends_a_request(outputs, params, expected):
    assert ended(outputs, **params) == expected
