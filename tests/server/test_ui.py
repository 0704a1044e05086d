"""The page of a server, read in a real browser, and what it asks for."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from heddle.layout.kv import KVLayout
from heddle.server.config import ServerConfig
from heddle.server.serving import Serving
from heddle.server.ui import load_facts
from tests.server.test_streams import LONG, eventually
from tests.support.browser import Browser, chromium, needs_chromium
from tests.support.served import Served, toy_server

KEY = "the-key-of-a-reader"
SHOWN = "document.body.dataset.live"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("toy")
    with toy_server(folder, api_key=(KEY,), step_seconds=0.02) as made:
        yield made


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as made:
        yield made


def with_key() -> dict[str, str]:
    return {"authorization": f"Bearer {KEY}"}


def facts_of(served: Served, path: str = "/load") -> dict[str, Any]:
    response = served.client.get(path, headers=with_key())
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_the_page_is_open_to_read_and_tells_nothing(locked: Served) -> None:
    response = locked.client.get("/")
    assert response.status_code == 200
    assert response.text == locked.client.get("/", headers=with_key()).text
    for secret in (KEY, "toy", str(locked.serving.plan.model_path)):
        assert secret not in response.text
    assert locked.client.head("/").status_code == 200
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert locked.client.request(method, "/").status_code == 401, method
    for path in ("/index.html", "/load", "/load?layout=1", "/nope"):
        assert locked.client.get(path).status_code == 401, path


def test_its_policy_lets_it_ask_its_server_and_nobody_else(locked: Served) -> None:
    headers = locked.client.get("/").headers
    policy = dict(
        part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("script-src", "style-src"):
        assert all(re.fullmatch(r"'sha256-[\w+/]{43}='", each) for each in policy[kind].split())
    assert headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


def test_load_says_how_full_the_pool_is_and_what_was_made(locked: Served) -> None:
    before = facts_of(locked)
    assert before["phase"] == "ready"
    assert (before["running"], before["kv_share"]) == (0, 0.0)
    assert before["kv_tokens_total"] == locked.serving.capacity.kv_tokens_total
    assert "layout" not in before
    body = {"prompt": "a", "max_tokens": 5, "ignore_eos": True}
    assert locked.client.post("/v1/completions", json=body, headers=with_key()).is_success
    eventually(
        lambda: facts_of(locked)["generated_tokens"] == before["generated_tokens"] + 5,
    )
    running = threading.Thread(
        target=lambda: locked.client.post(
            "/v1/completions", json={"prompt": "a", **LONG}, headers=with_key()
        )
    )
    running.start()
    eventually(lambda: facts_of(locked)["running"] == 1 and facts_of(locked)["kv_share"] > 0)
    assert 0 < facts_of(locked)["kv_share"] <= 1
    running.join()
    eventually(lambda: facts_of(locked)["running"] == 0)


def test_the_layout_is_that_which_runs(locked: Served) -> None:
    found = facts_of(locked, "/load?layout=1")["layout"]
    plan = locked.serving.plan
    assert found["layout"]["layout"]["world_size"] == plan.parallel.world_size
    assert found["layout"]["layout"]["executor"] == plan.executor
    assert len(found["places"]) == plan.parallel.world_size
    (short, window) = found["layout"]["kv"]["sequences"]
    assert window["seq_len"] == plan.scheduler.max_model_len
    stored = KVLayout(1, plan.parallel.kv_interleave_size, plan.cache.block_size)
    assert short["local_lens"] == [stored.local_len(64, 0)]


def test_before_there_are_ranks_there_is_little_to_tell() -> None:
    serving = Serving(ServerConfig(), "toy")
    found = load_facts(serving, with_layout=True)
    assert found["phase"] == "loading"
    assert found["layout"] is None
    assert not any(found[name] for name in ("running", "waiting", "kv_share", "generated_tokens"))


@needs_chromium
def test_a_key_opens_what_the_page_shows(locked: Served, browser: Browser) -> None:
    with browser.tab(f"{locked.url}/") as tab:
        tab.wait("document.querySelector('#state').textContent.includes('wants a key')")
        assert tab.evaluate(SHOWN) is None
        tab.evaluate("document.querySelector('#key').focus()")
        tab.type("wrong")
        tab.press("Enter")
        tab.wait("document.querySelector('#state').textContent.includes('does not know')")
        refusals = [each for each in tab.errors() if "401" not in each]
        assert refusals == [], "only the refusals themselves, which the console notes"
        tab.evaluate("document.querySelector('#key').select()")
        tab.type(KEY)
        tab.press("Enter")
        tab.wait(SHOWN)
        assert tab.text("#state") == "ready."
        numbers = tab.text("#now")
        assert f"{locked.serving.capacity.kv_tokens_total:,}" in numbers
        assert len(tab.evaluate("[...document.querySelectorAll('button[data-rank]')]")) == 1
        assert KEY not in tab.evaluate("document.documentElement.outerHTML + location.href")
        assert tab.evaluate("Object.keys(localStorage).length + document.cookie.length") == 0
        tab.wait(f"Number({SHOWN}) >= 3")
        assert tab.errors() == []


@needs_chromium
def test_what_the_page_shows_is_what_load_says(served: Served, browser: Browser) -> None:
    served.complete(prompt="a", max_tokens=7, ignore_eos=True)
    with browser.tab(f"{served.url}/") as tab:
        tab.wait(SHOWN)
        found = served.client.get("/load").json()
        words = tab.evaluate(
            "[...document.querySelectorAll('#now div')].map((d) => [...d.children]"
            ".map((each) => each.textContent))"
        )
        told = dict(words)
        assert told["running"] == str(found["running"]) == "0"
        assert told["KV in use"] == f"{100 * found['kv_share']:.1f}%"
        assert told["KV tokens in all"] == f"{found['kv_tokens_total']:,}"
        for chart in ("kv-series", "request-series", "token-series"):
            assert tab.evaluate(f"document.querySelector('#{chart} canvas').width") > 0
        assert tab.errors() == []
