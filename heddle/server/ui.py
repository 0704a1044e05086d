"""The page of this server: open to everybody, because it holds nothing.

It asks `/load` for what it shows, with the key that its reader types in.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from heddle.config import ParallelConfig
from heddle.server.serving import Serving
from heddle.view.document import layout_of_engine, of_layout
from heddle.view.page import live_page

SHORT_PROMPT = 64
"""Tokens of a prompt whose rows and tokens can be told apart by eye, drawn beside the window."""


async def page(request: Request) -> Response:
    """`GET /`: the same bytes for everybody."""
    del request
    text, headers = _page()
    return HTMLResponse(text, headers=headers)


@cache
def _page() -> tuple[str, dict[str, str]]:
    text, policy = live_page()
    return text, {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def load_facts(serving: Serving, *, with_layout: bool) -> dict[str, Any]:
    """What `/load` tells: a few numbers, at any time of a server's life.

    Args:
        serving: what is served.
        with_layout: also the layout, as pages draw it: asked for once, and large where ranks are
            many. It is null until there are ranks.
    """
    engine = serving.running_engine
    caches = [] if engine is None else [replica.cache for replica in engine.driver.replicas]
    usable = sum(each.num_usable_blocks for each in caches)
    available = sum(each.num_available_blocks for each in caches)
    found: dict[str, Any] = {
        "server_load": serving.num_open,
        "running": 0 if engine is None else engine.driver.num_running,
        "waiting": 0 if engine is None else engine.driver.num_waiting,
        "phase": serving.look(),
        "epoch": serving.epoch,
        "kv_share": 1 - available / usable if usable else 0.0,
        "kv_tokens_total": 0 if engine is None else serving.capacity.kv_tokens_total,
        "generated_tokens": serving.num_generated(),
    }
    if with_layout:
        found["layout"] = None if engine is None else _layout_of(serving)
    return found


def _layout_of(serving: Serving) -> dict[str, Any]:
    plan = serving.plan
    heads = plan.model.num_query_heads, plan.model.num_kv_heads
    window = plan.scheduler.max_model_len
    return _layout(plan.parallel, plan.cache.block_size, plan.executor, heads, window)


@lru_cache(maxsize=1)
def _layout(
    parallel: ParallelConfig, block_size: int, executor: str, heads: tuple[int, int], window: int
) -> dict[str, Any]:
    layout = layout_of_engine(parallel, block_size=block_size, executor=executor)
    lengths = sorted({min(SHORT_PROMPT, window), window})
    return of_layout("as it runs", parallel, layout, heads=heads, seq_lens=lengths)
