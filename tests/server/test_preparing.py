"""Whoever has a new form waits for others that have one, within its deadline, and nobody else."""

from __future__ import annotations

import asyncio
import threading

import pytest

from heddle.server.errors import ApiError
from heddle.server.preparing import (
    LARGE_BYTES,
    MAX_GIVEN,
    MAX_LARGE,
    MAX_SLOW,
    SLOW_THREADS,
    Preparing,
)


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


def test_who_has_a_template_of_his_own_holds_up_no_others() -> None:
    async def test() -> None:
        preparing, release = Preparing(), threading.Event()

        def render(*, is_given: bool) -> asyncio.Future[int]:
            work = release.wait if is_given else lambda: 7
            job = preparing.render(work, is_given=is_given, deadline=None)
            return asyncio.ensure_future(job)

        given = [render(is_given=True) for _ in range(MAX_GIVEN)]
        await asyncio.sleep(0)
        assert await render(is_given=False) == 7
        with pytest.raises(ApiError, match="templates of their own"):
            await render(is_given=True)
        release.set()
        assert all(await asyncio.gather(*given))

    asyncio.run(test())


def test_large_requests_of_one_client_have_turns_and_small_ones_need_none() -> None:
    async def test() -> None:
        preparing, order = Preparing(), list[str]()

        async def work(client: str, name: str, size: int, deadline: float | None = None) -> None:
            async with preparing.turn(client, size, deadline):
                order.append(f"{name} begins")
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                order.append(f"{name} ends")

        large = LARGE_BYTES + 1
        await asyncio.gather(work("a", "first", large), work("a", "second", large))
        assert order == ["first begins", "first ends", "second begins", "second ends"]
        for other in (("b", large), ("a", LARGE_BYTES)):
            order.clear()
            await asyncio.gather(work("a", "first", large), work(*other[:1], "other", other[1]))
            assert order[:2] == ["first begins", "other begins"]
        assert preparing._turns._locks == {}
        async with preparing.turn("a", large, None):
            soon = asyncio.get_running_loop().time() + 0.02
            with pytest.raises(ApiError, match="time limit"):
                await work("a", "late", large, soon)
            waiting = [asyncio.ensure_future(work("a", "w", large)) for _ in range(MAX_LARGE - 1)]
            await asyncio.sleep(0)
            with pytest.raises(ApiError, match="large requests of this client") as refused:
                await work("a", "one too many", large)
            assert refused.value.code == "engine_overloaded"
            await work("b", "other", large)
        await asyncio.gather(*waiting)
        assert preparing._turns._counts == {}

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
