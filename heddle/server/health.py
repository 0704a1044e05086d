"""Whether the engine serves: as it was last seen, or as every rank proves it now.

GET /health          from what is known; open, asked for every second
GET /health?deep=1   needs a key; every rank has answered a step within the last seconds, or does so

A deep look costs nothing while requests run. Of an idle engine it asks for one token
(`heddle.server.canary`); those who ask meanwhile wait for the same one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from heddle.engine.async_llm import AsyncLLM
from heddle.errors import HeddleError, NumericsError
from heddle.server.canary import Canaries
from heddle.server.errors import ApiError
from heddle.server.guard import is_deep
from heddle.server.serving import Phase, Serving

log = logging.getLogger("heddle.server")
FAULT_HEADER = {"x-heddle-fault-injection": "enabled"}
"""On /ready of a server that fails on purpose."""
FRESH_SECONDS = 5.0
"""For which a step proves that its ranks work, and a failure to get one that they do not."""
BUDGET_SECONDS = 20.0
"""Longest wait for a step of every rank."""
MAX_ALARMS = 5
"""Of live steps, in an answer."""
POLL_SECONDS = 0.02
"""Between two looks at ranks that work for others."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a deep look has found."""

    trouble: str
    """Why the engine is not well; empty: it is."""
    proven: float
    """Monotonic time since which every rank has answered a step; -inf: never."""
    took: float
    """Seconds that it took to see; 0: it was known."""
    made: float
    """Monotonic time."""


class DeepHealth:
    """Of one engine. Lives in the event loop."""

    def __init__(
        self,
        engine: AsyncLLM,
        canaries: Canaries,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with nothing known.

        Args:
            engine: warm.
            canaries: of its driver.
            clock: monotonic seconds, the same as that of the canaries' steps.
        """
        self._engine, self._canaries, self._clock = engine, canaries, clock
        self._last: Finding | None = None
        self._check: asyncio.Task[Finding] | None = None

    async def look(self) -> Finding:
        """What is known, or is found out within the budget."""
        known = self._known()
        if known is not None:
            return known
        if self._check is None or self._check.done():
            self._check = asyncio.ensure_future(self._find_out())
        return await asyncio.shield(self._check)  # the others go on when one reader leaves

    def age(self, finding: Finding) -> float | None:
        """Seconds since the step that a finding goes by; None: there was none."""
        return self._clock() - finding.proven if math.isfinite(finding.proven) else None

    def _known(self) -> Finding | None:
        last, now, proven = self._last, self._clock(), self._canaries.proven()
        if last is not None and last.proven == proven and now - last.made < FRESH_SECONDS:
            return last
        if now - proven < FRESH_SECONDS:
            return Finding("", proven, 0.0, now)
        return None

    async def _find_out(self) -> Finding:
        began, trouble = self._clock(), ""
        try:
            async with asyncio.timeout(BUDGET_SECONDS):
                while not await self._engine.call(partial(self._canaries.prove, began)):
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            trouble = f"not every rank has ended a step within {BUDGET_SECONDS:g} s"
        except NumericsError as error:
            trouble = str(error)
        except HeddleError as error:  # the first cause may name a host, a file, a line of code
            log.warning("a deep look at the engine: %s", error)
            trouble = "the engine has failed"
        now = self._clock()
        self._last = Finding(trouble, self._canaries.proven(), now - began, now)
        return self._last


async def health(request: Request) -> Response:
    """`GET /health`: 200 while the engine serves or will soon: who heals is not to be killed."""
    serving: Serving = request.app.state.serving
    phase = serving.look()
    is_well = phase in (Phase.READY, Phase.DRAINING)
    if not is_deep(request.scope):
        if not (is_well or phase is Phase.RECOVERING) or serving.is_overdue:
            raise ApiError(serving.trouble or "ranks are overdue", "engine_unavailable")
        if bad := _bad_numbers(serving):
            raise ApiError(bad, "engine_unavailable")
        return JSONResponse({})
    deep: DeepHealth | None = request.app.state.deep_health
    if not is_well or deep is None:
        return _deep_answer(serving.trouble or "no engine is there", None, 0.0)
    finding = await deep.look()
    trouble = finding.trouble or _bad_numbers(serving)
    checks = _live_checks(serving)
    return _deep_answer(trouble, deep.age(finding), finding.took, checks)


async def ready(request: Request) -> Response:
    """`GET /ready`: 200 while new requests are taken."""
    serving: Serving = request.app.state.serving
    if serving.look() is Phase.READY:
        is_armed = serving.plan.enable_fault_injection
        return JSONResponse({"status": "ready"}, headers=FAULT_HEADER if is_armed else None)
    raise ApiError(f"{serving.phase}: {serving.trouble}", "engine_unavailable")


def _bad_numbers(serving: Serving) -> str:
    """Why the engine's numbers are not to be trusted; empty: nothing speaks against them."""
    engine = serving.running_engine
    return "" if engine is None else engine.driver.bad_numbers.trouble


def _live_checks(serving: Serving) -> dict[str, Any]:
    """What is to be told of live steps that are held against one rank; usually nothing.

    Alarms are the first and the last ones. That the checks have stopped makes no engine unwell.
    """
    engine = serving.running_engine
    shadow = None if engine is None else engine.llm.shadow
    if shadow is None:
        return {}
    found, told = [str(alarm) for alarm in shadow.alarms], {}
    if found:
        few = found if len(found) <= MAX_ALARMS else [found[0], *found[1 - MAX_ALARMS :]]
        told["verify_alarms"] = few
    return {**told, "verify_stopped": True} if shadow.stopped else told


def _deep_answer(
    trouble: str, age: float | None, took: float, checks: Mapping[str, Any] | None = None
) -> Response:
    """The numbers, beside the error where there is one."""
    numbers: dict[str, Any] = {
        "age_s": None if age is None else round(age, 3),
        "took_s": round(took, 3),
        **(checks or {}),
    }
    if not trouble:
        return JSONResponse(numbers)
    error = ApiError(trouble, "engine_unavailable")
    return JSONResponse({**error.body(), **numbers}, error.status, dict(error.headers))
