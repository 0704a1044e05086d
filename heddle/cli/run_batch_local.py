"""A server inside this process for `heddle run-batch`: the whole application, and no socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx2

from heddle.engine.async_llm import AsyncLLM
from heddle.engine.llm import LLM
from heddle.server.app import create_app
from heddle.server.config import ServerConfig
from heddle.server.guard import Guard, KeyRing
from heddle.server.serving import Serving


@asynccontextmanager
async def local_client(
    llm: LLM, model: str, names: Sequence[str], max_concurrency: int
) -> AsyncIterator[tuple[httpx2.AsyncClient, AsyncLLM]]:
    """A client of a model that is loaded here; the model is closed with the block.

    Args:
        llm: loaded.
        model: as it was given on the command line.
        names: of the model in requests; none: `model`.
        max_concurrency: requests that the client has open at once.
    """
    engine = AsyncLLM(llm)
    try:
        serving = Serving(ServerConfig(served_model_name=tuple(names)), model)
        serving.begin(engine)
        app = Guard(
            create_app(serving),
            keys=KeyRing(()),
            local_only=False,
            origins=(),
            max_requests=max_concurrency,
        )
        # The application answers its own faults; the transport need not raise them as well.
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield client, engine
    finally:
        await engine.close()
