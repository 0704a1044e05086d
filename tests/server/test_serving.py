"""The engine behind the door: who is let in, what is told, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from starlette.requests import Request

from heddle.engine.async_llm import AsyncLLM
from heddle.errors import ConfigError, HeddleError, PromptTooLong, RankFailed, RequestError
from heddle.server.config import ServerConfig
from heddle.server.errors import ApiError
from heddle.server.job import ClientGone, while_there
from heddle.server.serving import MAX_IGNORED_NAMES, Phase, Serving
from tests.support.offered import assert_no_tickets, run_serving, submit_job
from tests.support.toy_engine import ToyLLM


def asked(**headers: str) -> Request:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": pairs})


def test_a_server_that_loads_says_so() -> None:
    serving = Serving(ServerConfig(), "toy")
    assert serving.look() is Phase.LOADING
    assert serving.running_engine is None
    for ask in (lambda: serving.engine, lambda: serving.plan, lambda: serving.tokenizer):
        with pytest.raises(ApiError, match="the model is loading") as caught:
            ask()
        assert caught.value.status == 503


def test_each_phase_but_ready_takes_nothing() -> None:
    async def body(serving: Serving, engine: AsyncLLM, llm: ToyLLM) -> None:
        assert serving.look() is Phase.READY
        assert serving.engine is engine
        serving.drain("it is late")
        with pytest.raises(ApiError, match="not ready: it is late"):
            await submit_job(serving, 3)
        assert serving.running_engine is engine
        assert serving.plan is llm.plan, "facts are told still"
        serving.fail("it broke")
        serving.drain("it is late")
        assert (serving.phase, serving.reason) == (Phase.FAILED, "it broke")
        assert_no_tickets(serving)

    run_serving(body)


def test_a_failed_engine_is_seen_by_looking() -> None:
    async def body(serving: Serving, engine: AsyncLLM, llm: ToyLLM) -> None:
        llm.executor.failure = RankFailed("rank 1 was killed")
        job = await submit_job(serving, 3)
        with job, pytest.raises(RankFailed, match="rank 1"):
            await job.whole()
        assert serving.look() is Phase.FAILED
        with pytest.raises(ApiError) as caught:
            await submit_job(serving, 3)
        assert caught.value.code == "engine_unavailable"
        assert "rank" not in caught.value.message
        assert_no_tickets(serving)

    run_serving(body)


def test_sizes_are_those_of_the_pool_and_the_window() -> None:
    async def body(serving: Serving, engine: AsyncLLM, llm: ToyLLM) -> None:
        assert serving.capacity.kv_tokens_total == 32 * 4
        assert serving.max_model_len == 256
        assert serving.capacity.longest_prompt == 32 * 4
        assert serving.max_body_bytes == 8 * 256 + 65536

    run_serving(body, num_blocks=33)

    async def small(serving: Serving, engine: AsyncLLM, llm: ToyLLM) -> None:
        assert serving.capacity.longest_prompt == 15

    run_serving(small, max_model_len=16)


def test_names_stand_for_the_model_or_nobody() -> None:
    async def body(serving: Serving, engine: AsyncLLM, llm: ToyLLM) -> None:
        assert serving.names == ("a", "b")
        for name in (None, "a", "b"):
            assert serving.adapter_of(name) is None
        with pytest.raises(ApiError, match="models here: a, b") as caught:
            serving.adapter_of("SECRET")
        assert caught.value.code == "model_not_found"
        assert "SECRET" not in caught.value.message

    run_serving(body, {"served_model_name": ("a", "b")})


def test_the_fingerprint_tells_layouts_and_defaults_apart() -> None:
    found = []

    async def body(serving: Serving, engine: AsyncLLM, llm: ToyLLM) -> None:
        found.append(serving.fingerprint)

    for seed in (0, 0, 1):
        run_serving(body, seed=seed)
    assert found[0] == found[1] != found[2]
    assert found[0].startswith("heddle-")


def test_a_model_without_a_tokenizer_says_what_is_left() -> None:
    async def body(serving: Serving, engine: AsyncLLM, llm: ToyLLM) -> None:
        with pytest.raises(ApiError, match="no tokenizer; pass token ids"):
            serving.need_tokenizer()

    run_serving(body)


@pytest.mark.parametrize("text", ["[1]", "3", "{", "[" * 100_000])
def test_template_variables_are_an_object(text: str) -> None:
    serving = Serving(ServerConfig(default_chat_template_kwargs=text), "toy")
    with pytest.raises(ConfigError, match="a JSON object is expected"):
        serving.check()


def test_files_of_settings_are_read_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages }}", encoding="utf-8")
    settings = ServerConfig(chat_template=str(path), default_chat_template_kwargs='{"a": 1}')
    serving = Serving(settings, "toy")
    serving.check()
    assert (serving.template, serving.template_variables) == ("{{ messages }}", {"a": 1})
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="the chat template"):
        Serving(settings, "toy").check()


def test_unknown_fields_are_logged_once_and_not_without_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    serving = Serving(ServerConfig(), "toy")
    with caplog.at_level(logging.INFO, "heddle.server"):
        for _ in range(2):
            serving.note_ignored(["one", "x\n\u2028" + "y" * 1000])
        assert len(caplog.messages) == 2
        assert all(len(line) < 200 and line.isprintable() for line in caplog.messages)
        serving.note_ignored([str(number) for number in range(10 * MAX_IGNORED_NAMES)])
    assert len(caplog.messages) == MAX_IGNORED_NAMES


@pytest.mark.parametrize(
    ("setting", "header", "seconds"),
    [
        (0.0, None, None),
        (5.0, None, 5.0),
        (0.0, "1500", 1.5),
        (5.0, "1500", 1.5),
        (1.0, "9000", 1.0),
        (0.0, "1" + "0" * 30, 1e8),
    ],
)
def test_the_shorter_time_limit_counts(
    setting: float, header: str | None, seconds: float | None
) -> None:
    async def body(serving: Serving, engine: AsyncLLM, llm: ToyLLM) -> None:
        request = asked() if header is None else asked(x_request_timeout_ms=header)
        before = asyncio.get_running_loop().time()
        found = serving.deadline(request)
        after = asyncio.get_running_loop().time()
        if seconds is None:
            assert found is None
        else:
            assert found is not None
            assert before + seconds <= found <= after + seconds

    run_serving(body, {"request_timeout": setting})


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "x", "1e3", "\u0661"])
def test_a_time_limit_is_a_whole_number_above_zero(text: str) -> None:
    with pytest.raises(ApiError, match="whole number of milliseconds"):
        Serving(ServerConfig(), "toy").deadline(
            Request({"type": "http", "headers": [(b"x-request-timeout-ms", text.encode())]})
        )


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (ApiError("mine", "not_found"), 404, "mine"),
        (PromptTooLong("long", "context_length_exceeded"), 400, "long"),
        (RequestError("bad", "generation_failed"), 500, "bad"),
        (RankFailed("rank 1 on host x"), 503, "the engine has failed"),
        (HeddleError("closed"), 503, "the server stopped before"),
        (ZeroDivisionError("/secret/path"), 500, "internal error"),
    ],
)
def test_clients_are_told_what_concerns_them(error: Exception, status: int, words: str) -> None:
    told = Serving(ServerConfig(), "toy").explain(error)
    assert told.status == status
    assert words in told.message
    assert "secret" not in told.message
    assert "host x" not in told.message


class Client:
    """A request whose client leaves when told to."""

    def __init__(self) -> None:
        self.has_left = asyncio.Event()

    async def receive(self) -> dict[str, str]:
        await self.has_left.wait()
        return {"type": "http.disconnect"}


def test_work_is_given_up_when_its_client_leaves() -> None:
    async def body() -> None:
        client, ended = Client(), []

        async def work() -> int:
            try:
                client.has_left.set()
                await asyncio.get_running_loop().create_future()
            finally:
                ended.append(True)
            return 1

        with pytest.raises(ClientGone):
            await while_there(client, work())  # type: ignore[arg-type]
        assert ended == [True]

    asyncio.run(body())


def test_work_that_ends_gives_its_result_or_its_error() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 3

    async def fails() -> int:
        raise ZeroDivisionError("inside")

    async def body() -> None:
        assert await while_there(Client(), work()) == 3  # type: ignore[arg-type]
        with pytest.raises(ZeroDivisionError, match="inside"):
            await while_there(Client(), fails())  # type: ignore[arg-type]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(body())
