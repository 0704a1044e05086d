from __future__ import annotations

from heddle.config import SamplingParams
from heddle.layout.kv import KVLayout
from heddle.scheduler.request import Request


def test_outputs_that_exist_already_count_as_tokens_to_compute():
    request = Request(
        request_id=3,
        prompt_token_ids=(1, 2, 3),
        params=SamplingParams(),
        max_output_tokens=4,
        kv_layout=KVLayout(1, 1, 4),
        output_token_ids=[8],
    )
    request.append_output(9)
    assert request.token_ids == [1, 2, 3, 8, 9]
    assert request.output_token_ids == [8, 9]
    assert (request.num_prompt_tokens, request.num_tokens) == (3, 5)
    request.num_computed_tokens = 4
    assert request.num_uncomputed_tokens == 1
    assert (request.block_tables, request.is_finished) == ((), False)
