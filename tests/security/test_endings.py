"""An answer that did not end well does not look as if it had: with OpenAI's own client."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from heddle.errors import RankFailed
from tests.support.fake_executor import FakeExecutor
from tests.support.processes import LONG_SECONDS, seconds_until
from tests.support.served import Served, toy_server

LONG: dict[str, Any] = {"model": "toy", "prompt": "a", "max_tokens": 200}
LONG |= {"extra_body": {"ignore_eos": True}, "extra_headers": {"x-request-id": "long"}}


class Spy:
    """Answers of the server as they come, below the client of OpenAI."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.retries: list[str | None] = []

    def note(self, response: Any) -> None:
        self.statuses.append(response.status_code)
        self.retries.append(response.headers.get("x-should-retry"))


def client_of(served: Served, spy: Spy, **options: Any) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(event_hooks={"response": [spy.note]})
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", http_client=http, **options)


def fail(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_now(*_: object) -> None:
        raise RankFailed("rank 1 has died")

    monkeypatch.setattr(FakeExecutor, "collect", raise_now)


def end_by_operator(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    del monkeypatch
    served.loop.call_soon_threadsafe(served.serving.abort, "long")


def stop_twice(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    del monkeypatch
    served.stop()
    served.stop()


ENDINGS: dict[str, tuple[Callable[[Served, pytest.MonkeyPatch], None], str]] = {
    "the engine fails": (fail, "engine_unavailable"),
    "the operator ends it": (end_by_operator, "engine_unavailable"),
    "the server is stopped at once": (stop_twice, "engine_unavailable"),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_stream_that_is_cut_short_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    act, code = ENDINGS[ending]
    spy = Spy()
    with (
        toy_server(tmp_path, step_seconds=0.02, engine={"max_restarts": 0}) as served,
        client_of(served, spy) as client,
        client.completions.create(**LONG, stream=True) as stream,
    ):
        chunks = [next(iter(stream))]
        act(served, monkeypatch)
        with pytest.raises(openai.APIError) as failed:
            chunks.extend(stream)
    assert failed.value.code == code
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks)
    assert spy.statuses == [200], "what began is not asked for again"


def test_a_stream_that_is_late_raises(tmp_path: Path) -> None:
    spy = Spy()
    with (
        toy_server(tmp_path, step_seconds=0.02, request_timeout=0.5) as served,
        client_of(served, spy) as client,
    ):
        stream = client.completions.create(**LONG, stream=True)
        with pytest.raises(openai.APIError) as failed:
            list(stream)
        assert failed.value.code == "request_timeout"


@pytest.mark.parametrize(
    ("ending", "retry"), [("the engine fails", 0), ("the operator ends it", 2)]
)
def test_an_answer_that_is_cut_short_has_a_status_and_says_whether_to_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, retry: int
) -> None:
    spy = Spy()
    found: list[openai.APIStatusError] = []
    with (
        toy_server(tmp_path, step_seconds=0.02, engine={"max_restarts": 0}) as served,
        client_of(served, spy, max_retries=retry) as client,
    ):

        def ask() -> None:
            with pytest.raises(openai.APIStatusError) as failed:
                client.completions.create(**LONG)
            found.append(failed.value)

        thread = threading.Thread(target=ask)
        thread.start()
        assert seconds_until(lambda: served.serving.num_open == 1) < LONG_SECONDS
        ENDINGS[ending][0](served, monkeypatch)
        thread.join(LONG_SECONDS)
    (error,) = found
    assert error.status_code == 503
    assert error.code == "engine_unavailable"
    assert error.response.headers.get("x-should-retry") == ("false" if retry else None)
    assert spy.statuses == [503], "a server that has failed may be asked again, by default it is"


def test_a_fault_of_ours_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail_there(*_: Any, **__: Any) -> None:
        raise KeyError("of ours")

    spy = Spy()
    with toy_server(tmp_path) as served, client_of(served, spy) as client:
        monkeypatch.setattr("heddle.server.serving.Serving.submit", fail_there)
        for is_stream in (False, True):
            with pytest.raises(openai.InternalServerError) as failed:
                client.completions.create(**LONG, stream=is_stream)
            assert failed.value.code == "internal_error"
    assert spy.statuses == [500, 500]
    assert spy.retries == ["false", "false"]
