"""A server on loopback over a model that computes nothing: a toy decides the next token.

All of HTTP is real: sockets, uvicorn, the guard, the event loop in a thread of its own. Only the
ranks are played.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from heddle import LLM
from heddle.config import EngineConfig, ResolvedConfig
from heddle.engine.args import engine_config
from heddle.engine.llm import Watch
from heddle.server.config import ServerConfig
from heddle.server.guard import KeyRing
from heddle.server.listening import bind, bind_admin, url_of
from heddle.server.run import Server
from heddle.server.serving import Serving
from heddle.step.batch import RankReply
from tests.support.byte_tokenizer import TEMPLATE, byte_level, save_folder
from tests.support.fake_executor import FakeExecutor

VOCAB = 270
READY_SECONDS = 120.0


def toy_folder(folder: Path, **changes: Any) -> Path:
    """A model folder without weights: bytes are tokens."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 0,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        **changes,
    }
    save_folder(folder, byte_level(), eos_token="<|end|>", chat_template=TEMPLATE)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class SlowExecutor(FakeExecutor):
    """Its steps take time."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        seconds: float,
        is_poisoned: Callable[[Sequence[int]], bool],
        on_start: Callable[[SlowExecutor], None],
    ) -> None:
        super().__init__(resolved, is_poisoned=is_poisoned)
        self._seconds = seconds
        self._on_start = on_start
        self.epoch = resolved.epoch

    def start(self) -> None:
        self._on_start(self)

    def collect(self, replica: int) -> tuple[RankReply, ...]:
        time.sleep(self._seconds)
        return super().collect(replica)


class Served:
    """A server that runs, and a client for it."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop, url: str) -> None:
        self.server = server
        self.serving = server.serving
        self.loop = loop
        self.url = url
        self.client = httpx2.Client(base_url=url, timeout=60.0)

    def post(self, path: str, **body: Any) -> httpx2.Response:
        """A request with a JSON body."""
        return self.client.post(path, json=body)

    def complete(self, **body: Any) -> dict[str, Any]:
        """An answer of /v1/completions that went well."""
        response = self.post("/v1/completions", **body)
        assert response.status_code == 200, response.text
        document: dict[str, Any] = response.json()
        return document

    def chat(self, **body: Any) -> dict[str, Any]:
        """An answer of /v1/chat/completions that went well."""
        response = self.post("/v1/chat/completions", **body)
        assert response.status_code == 200, response.text
        document: dict[str, Any] = response.json()
        return document

    def events(self, path: str, **body: Any) -> list[Any]:
        """The events of a stream; the last one of a good stream is `[DONE]`."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            text = "".join(response.iter_text())
        assert response.status_code == 200, text
        return parse_events(text)

    def stop(self) -> None:
        """As a signal would."""
        self.loop.call_soon_threadsafe(self.server.stop)


def parse_events(text: str) -> list[Any]:
    """Documents of the events in a body, comments left out."""
    found: list[Any] = []
    for block in text.split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
        else:
            assert not block or block.startswith(":"), block
    return found


@contextmanager
def serving(load: Callable[[Watch], LLM], model: str, **settings: Any) -> Iterator[Served]:
    """Serve until the block ends; then the server must end in good order.

    Args:
        load: makes the engine.
        model: its name.
        settings: of `ServerConfig`.
    """
    config = ServerConfig(**settings) if "uds" in settings else ServerConfig(port=0, **settings)
    listener, admin_listener = bind(config), bind_admin(config)
    ready = threading.Event()
    made: list[Any] = []
    ended: list[Any] = []

    async def run() -> int:
        server = Server(
            lambda watch, on_plan: load(watch),
            EngineConfig(model=model),
            Serving(config, model),
            KeyRing(config.api_key),
            listener,
            admin_listener=admin_listener,
            on_ready=lambda *_: ready.set(),
            say=lambda _: None,
        )
        made.extend((server, asyncio.get_running_loop()))
        return await server.run()

    def body() -> None:
        try:
            ended.append(asyncio.run(run()))
        except BaseException as error:
            ended.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=body)
    thread.start()
    try:
        assert ready.wait(READY_SECONDS)
        assert not ended, ended
        served = Served(made[0], made[1], url_of(config, listener))
        with served.client:
            yield served
    finally:
        if made and not made[1].is_closed():
            made[1].call_soon_threadsafe(made[0].stop)
        thread.join(READY_SECONDS)
        listener.close()
        if admin_listener is not None:
            admin_listener.close()
        assert not thread.is_alive()
    assert ended in ([0], [1]), ended


@contextmanager
def toy_server(
    folder: Path,
    *,
    engine: dict[str, Any] | None = None,
    step_seconds: float = 0.0,
    is_poisoned: Callable[[Sequence[int]], bool] = lambda tokens: False,
    on_start: Callable[[SlowExecutor], None] = lambda executor: None,
    **settings: Any,
) -> Iterator[Served]:
    """A server over the toy model.

    Args:
        folder: an empty one.
        engine: settings of the engine.
        step_seconds: that every step takes.
        is_poisoned: by the tokens so far, whether the row's logits are NaN.
        on_start: called when ranks start, for the first time or anew.
        settings: of the server.
    """
    path = str(toy_folder(folder))

    def create(resolved: ResolvedConfig, **ignored: object) -> FakeExecutor:
        return SlowExecutor(resolved, step_seconds, is_poisoned, on_start)

    def load(watch: Watch) -> LLM:
        arguments = {"max_num_batched_tokens": 32, "kv_cache_memory_bytes": 1 << 20}
        config = engine_config(path, **{**arguments, **(engine or {})})
        with pytest.MonkeyPatch.context() as patch:  # for no longer than this engine is made
            patch.setattr("heddle.engine.llm.create_executor", create)
            return LLM.from_config(config, watch=watch)

    with serving(load, "toy", **settings) as served:
        yield served
