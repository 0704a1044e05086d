"""Long prompts among chats, and three times too much, scaled down: bounds are counted in steps."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2

from heddle.step.batch import GlobalBatch
from tests.server.test_streams import eventually, is_empty
from tests.support.served import Served, parse_events, toy_server

CHATS, LONG_PROMPTS = 6, 4


def batches_of(served: Served) -> list[GlobalBatch]:
    """What the ranks were given, step by step."""
    executor: Any = served.serving.engine.driver._executor
    found: list[GlobalBatch] = executor.inner.batches
    return found


def test_no_running_answer_misses_a_step_while_long_prompts_come(tmp_path: Path) -> None:
    engine = {"max_num_batched_tokens": 16, "kv_cache_memory_bytes": 1 << 21}
    with toy_server(tmp_path, engine=engine, step_seconds=0.002) as served:

        async def chat(client: httpx2.AsyncClient, number: int) -> None:
            for turn in range(3):
                body = {
                    "prompt": [5 + number, 6 + turn],
                    "max_tokens": 40,
                    "ignore_eos": True,
                    "stream": True,
                }
                response = await client.post("/v1/completions", json=body)
                assert parse_events(response.text)[-1] == "[DONE]"

        async def long(client: httpx2.AsyncClient, number: int) -> None:
            await asyncio.sleep(0.02 * number)
            body = {"prompt": [9 + number] * 200, "max_tokens": 2, "ignore_eos": True}
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200

        async def all_of_them() -> None:
            async with httpx2.AsyncClient(base_url=served.url, timeout=600.0) as client:
                chats = [chat(client, number) for number in range(CHATS)]
                await asyncio.gather(*chats, *(long(client, n) for n in range(LONG_PROMPTS)))

        asyncio.run(all_of_them())
        eventually(lambda: is_empty(served))
        steps: dict[int, list[int]] = {}
        decodes: dict[int, list[int]] = {}
        num_mixed = 0
        for index, batch in enumerate(batches_of(served)):
            kinds = set()
            for request in batch.requests:
                steps.setdefault(request.request_id, []).append(index)
                is_decode = len(request.token_ids) == 1 and request.num_computed_tokens > 0
                kinds.add(is_decode)
                if is_decode:
                    decodes.setdefault(request.request_id, []).append(index)
            num_mixed += len(kinds) == 2
        assert num_mixed > 20
        assert len(decodes) >= 3 * CHATS + LONG_PROMPTS
        for places in decodes.values():  # one token in each step, from the first to the last
            assert places == list(range(places[0], places[-1] + 1))


def test_three_times_too_much_is_refused_at_once_and_drains(tmp_path: Path) -> None:
    engine = {"max_num_seqs": 4, "max_num_queued_reqs": 4}
    with toy_server(tmp_path, engine=engine, step_seconds=0.01) as served:
        found: list[int] = []

        async def ask(client: httpx2.AsyncClient, number: int) -> None:
            await asyncio.sleep(0.01 * number)
            body = {"prompt": [3 + number % 200], "max_tokens": 12, "ignore_eos": True}
            response = await client.post("/v1/completions", json=body)
            found.append(response.status_code)
            if response.status_code == 429:
                assert 1 <= int(response.headers["retry-after"]) <= 60
            else:
                assert response.json()["usage"]["completion_tokens"] == 12

        async def all_of_them() -> None:
            limits = httpx2.Limits(max_connections=None)
            async with httpx2.AsyncClient(
                base_url=served.url, timeout=600.0, limits=limits
            ) as client:
                await asyncio.gather(*(ask(client, number) for number in range(150)))

        asyncio.run(all_of_them())
        assert set(found) == {200, 429}
        assert len(found) == 150
        eventually(lambda: is_empty(served))
        served.serving.engine.driver.audit()
        # Whoever was let in waited behind no more than the queue and the seats.
        assert max(len(batch.requests) for batch in batches_of(served)) <= 4
        assert served.complete(prompt="a", max_tokens=1)["choices"]
