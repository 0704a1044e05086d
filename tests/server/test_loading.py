"""A model is held against one rank before anybody is served, whichever command loads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from heddle.engine.args import engine_config
from heddle.engine.llm import LLM
from heddle.errors import NumericsError
from heddle.server import loading
from heddle.server.loading import load_checked, load_here
from tests.support.tiny import build_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tiny"), "llama-8-2")


def config_of(folder: Path, **changes: object) -> object:
    settings = {"executor": "threads", "num_gpu_blocks_override": 100, "block_size": 4, **changes}
    return engine_config(str(folder), **settings)


def test_a_command_says_what_it_does_in_its_order(folder: Path) -> None:
    said: list[str] = []
    load_here(config_of(folder, tensor_parallel_size=2), said.append).close()  # type: ignore[arg-type]
    told = [line for line in said if not line.startswith("compiling")]
    assert told[0] == f"loading {folder}"
    assert told[1].startswith("plan: TP 2, PCP 1")
    assert told[2].startswith("self-check: logits within")
    assert told[-1].startswith("loaded in ")


def test_the_plan_is_told_before_anything_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(Exception):
        pass

    def stop(*_: object, **__: object) -> None:
        raise Stopped

    monkeypatch.setattr("heddle.engine.llm.create_executor", stop)
    plans: list[object] = []
    with pytest.raises(Stopped):
        load_checked(config_of(folder), "auto", None, print, on_plan=plans.append)  # type: ignore[arg-type]
    assert len(plans) == 1


def test_a_layout_that_gives_other_numbers_is_closed_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[LLM] = []
    close = LLM.close
    monkeypatch.setattr(LLM, "close", lambda llm: (closed.append(llm), close(llm)))

    def differ(*_: object) -> float:
        raise NumericsError("other numbers")

    monkeypatch.setattr(loading, "check_layout", differ)
    said: list[str] = []
    config = config_of(folder, tensor_parallel_size=2)
    with pytest.raises(NumericsError, match="other numbers"):
        load_here(config, said.append)  # type: ignore[arg-type]
    assert len(closed) == 1
    assert not any(line.startswith("loaded") for line in said)
    load_checked(config, "off", None, said.append).close()  # type: ignore[arg-type]
    assert said[-1] == "self-check: none, it is switched off"
