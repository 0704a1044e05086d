"""Whoever has a new form waits for others that have one, within its deadline, and nobody else."""

from __future__ import annotations

import asyncio
import threading

import pytest

from heddle.server.errors import ApiError
from heddle.server.preparing import MAX_SLOW, SLOW_THREADS, Preparing


def test_others_do_not_wait_for_slow_ones_and_too_many_are_refused() -> None:
    async def test() -> None:
        preparing, release = Preparing(), threading.Event()
        slow = [
            asyncio.ensure_future(preparing.run(release.wait, is_slow=True, deadline=None))
            for _ in range(MAX_SLOW)
        ]
        await asyncio.sleep(0)
        assert await preparing.run(lambda: 7, is_slow=False, deadline=None) == 7
        with pytest.raises(ApiError, match="wait to be compiled") as refused:
            await preparing.run(lambda: 7, is_slow=True, deadline=None)
        assert refused.value.code == "engine_overloaded"
        release.set()
        assert all(await asyncio.gather(*slow))
        assert await preparing.run(lambda: 8, is_slow=True, deadline=None) == 8

    asyncio.run(test())


def test_who_waits_behind_others_is_let_go_at_its_deadline() -> None:
    async def test() -> None:
        preparing, release = Preparing(), threading.Event()
        ran: list[int] = []
        slow = [
            asyncio.ensure_future(preparing.run(release.wait, is_slow=True, deadline=None))
            for _ in range(SLOW_THREADS)
        ]
        await asyncio.sleep(0)
        soon = asyncio.get_running_loop().time() + 0.05
        with pytest.raises(ApiError, match="time limit") as late:
            await preparing.run(lambda: ran.append(1), is_slow=True, deadline=soon)
        assert late.value.code == "request_timeout"
        release.set()
        await asyncio.gather(*slow)
        assert await preparing.run(lambda: 8, is_slow=True, deadline=None) == 8
        assert ran == []

    asyncio.run(test())
