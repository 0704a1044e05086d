from __future__ import annotations

import asyncio
import io
import json
import sys
from pathlib import Path

from heddle import LLM
from heddle.cli import chat_local
from heddle.cli.chat_local import LocalPartner
from heddle.cli.main import main
from heddle.engine.inputs import PromptInput

ASK = [{"role": "user", "content": "hi"}]


def test_leaving_an_answer_ends_it_and_the_next_one_begins_anew(tiny_folder):
    async def follow():
        llm = LLM(str(tiny_folder))
        partner = LocalPartner(llm, "tiny", {"temperature": 0.0, "ignore_eos": True})
        left = [[piece async for piece in until(partner.answer(ASK), 3)] for _ in range(2)]
        while llm.driver.has_work:
            await asyncio.sleep(0.01)
        metrics = llm.get_metrics()
        await partner.close()
        return left, metrics, llm.plan.scheduler.max_model_len

    (first, again), metrics, window = asyncio.run(follow())
    assert [len(first), len(again)] == [3, 3]
    assert again[0].num_tokens >= 1
    assert metrics["generation_tokens"] < window  # one answer alone would have filled it
    assert metrics["requests_abort"] == 2


async def until(pieces, num):
    """The first pieces; the rest is left."""
    try:
        for _ in range(num):
            yield await anext(pieces)
    finally:
        await pieces.aclose()


def test_an_answer_has_the_room_of_the_window_unless_told_otherwise(tiny_folder):
    async def follow(sampling):
        llm = LLM(str(tiny_folder), max_model_len=64)
        partner = LocalPartner(llm, "tiny", {"ignore_eos": True, **sampling})
        pieces = [piece async for piece in partner.answer(ASK)]
        await partner.close()
        return pieces[-1].num_tokens

    prompt_len = len("<user\nhi>\n<assistant\n")
    assert asyncio.run(follow({})) == 64 - prompt_len
    assert asyncio.run(follow({"max_tokens": 5})) == 5


def test_the_special_tokens_are_those_of_the_template_alone(tiny_folder, monkeypatch):
    prompts = []

    class Engine:
        def __init__(self, llm):
            pass

        async def generate(self, prompt, params):
            prompts.append(prompt)
            for _ in ():
                yield

    async def follow(llm):
        return [piece async for piece in LocalPartner(llm, "tiny", {}).answer(ASK)]

    monkeypatch.setattr(chat_local, "AsyncLLM", Engine)
    with LLM(str(tiny_folder)) as llm:
        assert asyncio.run(follow(llm)) == []
    text = "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert prompts == [PromptInput(text=text, add_special_tokens=False)]


def test_a_model_without_a_template_cannot_chat(tiny_folder, tmp_path, monkeypatch, capsys):
    for path in Path(tiny_folder).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert main(["chat", str(tmp_path)]) == 2
    assert "has no chat template; heddle generate completes text" in capsys.readouterr().err
