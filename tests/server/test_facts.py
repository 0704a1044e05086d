"""Small endpoints."""

from __future__ import annotations

import heddle
from tests.support.served import VOCAB, Served


def test_models_are_listed_and_found_by_name(served: Served) -> None:
    listed = served.client.get("/v1/models").json()
    (model,) = listed["data"]
    assert listed["object"] == "list"
    assert (model["id"], model["object"], model["max_model_len"]) == ("toy", "model", 256)
    assert served.client.get("/v1/models/toy").json() == model
    missing = served.client.get("/v1/models/org/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_probes_say_that_it_is_ready(served: Served) -> None:
    for method, path in (
        ("GET", "/health"),
        ("GET", "/ready"),
        ("GET", "/ping"),
        ("POST", "/ping"),
    ):
        assert served.client.request(method, path).status_code == 200
    assert served.client.get("/version").json() == {"version": heddle.__version__}
    load = served.client.get("/load").json()
    told = {"server_load": 0, "running": 0, "waiting": 0, "phase": "ready", "epoch": 0}
    assert {name: load[name] for name in told} == told


def test_text_goes_to_ids_and_back(served: Served) -> None:
    found = served.post("/tokenize", prompt="héllo", return_token_strs=True).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 256
    assert served.post("/detokenize", tokens=found["tokens"]).json() == {"prompt": "héllo"}
    assert served.post("/detokenize", tokens=[]).json() == {"prompt": ""}


def test_tokens_of_a_conversation_are_those_of_its_prompt(served: Served) -> None:
    messages = [{"role": "user", "content": "hello"}]
    counted = served.post("/tokenize", messages=messages).json()["count"]
    found = served.chat(messages=messages, max_tokens=1)
    assert found["usage"]["prompt_tokens"] == counted


def test_ids_outside_the_vocabulary_have_no_text(served: Served) -> None:
    for bad in (-1, VOCAB, 2**40):
        response = served.post("/detokenize", tokens=[1, bad])
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tokens.1"
    assert served.post("/tokenize", prompt="a", messages=[]).status_code == 400
    assert served.post("/tokenize").status_code == 400


def test_the_tokenizer_can_be_rebuilt(served: Served) -> None:
    found = served.client.get("/tokenizer_info").json()
    assert found["eos_token"] == "<|end|>"
    assert "messages" in found["chat_template"]
