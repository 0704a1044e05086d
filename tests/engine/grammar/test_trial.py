"""What runs away in a helper ends there, in time, and the next description is compiled as ever."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from heddle.engine import helper_process
from heddle.engine.grammar.compiler import GrammarCompiler
from heddle.engine.grammar.source import lark_text
from heddle.engine.grammar.trial import MAX_HELPERS, PlainTokens, Trials
from heddle.engine.helper_process import Limits
from heddle.errors import RequestError
from tests.support.grammars import BOTH, EOS, create, describe
from tests.support.processes import LONG_SECONDS

RUNAWAY = lark_text(
    describe(json={"allOf": [{"type": "string", "pattern": f"a{{{n}}}"} for n in range(1, 300)]})
)
"""Neither the library's own limits nor its length bound it."""
GOOD = lark_text(describe(regex="[a-z]{3}"))


def tokens() -> PlainTokens:
    return BOTH["bytes"][1]._get_vocabulary().plain()


@pytest.fixture
def trials() -> Iterator[Trials]:
    made = Trials(tokens, Limits(seconds=0.5, memory_bytes=1 << 30))
    yield made
    made.close()


def helpers() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if "grammar.trial" in " ".join(child.cmdline())]


def test_the_helper_says_what_the_library_says(trials: Trials) -> None:
    trials.run(GOOD)
    with pytest.raises(ValueError, match="no text"):
        trials.run('start: start "a"')
    trials.run(GOOD)
    assert len(trials._helpers._idle) == 1, "one helper does it all"


def test_a_description_out_of_time_ends_its_helper_alone(trials: Trials) -> None:
    trials.run(GOOD)
    (first,) = trials._helpers._idle
    with pytest.raises(ValueError, match=r"more than 0\.5 s"):
        trials.run(RUNAWAY)
    assert first._process.returncode == -signal.SIGALRM
    trials.run(GOOD)
    assert trials._helpers._idle != [first]


def test_a_description_out_of_memory_ends_its_helper_alone() -> None:
    trials = Trials(tokens, Limits(seconds=60.0, memory_bytes=8 << 20))
    trials.run(GOOD)
    with pytest.raises(ValueError, match="more than 8 MiB"):
        trials.run(RUNAWAY)
    trials.run(GOOD)
    trials.close()


def test_a_helper_that_does_not_even_die_is_killed(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials.run(GOOD)
    (helper,) = trials._helpers._idle
    monkeypatch.setattr(helper_process, "GRACE_SECONDS", 0.0)
    helper._process.send_signal(signal.SIGSTOP)
    with pytest.raises(ValueError, match="more than"):
        trials.run(GOOD)
    assert helper._process.returncode == -signal.SIGKILL
    trials.run(GOOD)


def test_a_good_one_need_not_wait_for_one_that_runs_away(
    monkeypatch: pytest.MonkeyPatch, trials: Trials
) -> None:
    both = threading.Barrier(2, timeout=LONG_SECONDS)  # with one helper they would never meet
    ask = helper_process.Helper.ask

    def ask_together(helper: helper_process.Helper, text: bytes) -> bytes:
        both.wait()
        return ask(helper, text)

    monkeypatch.setattr(helper_process.Helper, "ask", ask_together)
    with ThreadPoolExecutor(2) as pool:
        slow, good = pool.submit(trials.run, RUNAWAY), pool.submit(trials.run, GOOD)
        good.result()
        with pytest.raises(ValueError, match="more than"):
            slow.result()


def test_a_helper_that_was_at_work_when_all_were_closed_ends_with_its_description(
    monkeypatch: pytest.MonkeyPatch, trials: Trials
) -> None:
    ask = helper_process.Helper.ask

    def close_and_ask(helper: helper_process.Helper, text: bytes) -> bytes:
        trials.close()
        return ask(helper, text)

    monkeypatch.setattr(helper_process.Helper, "ask", close_and_ask)
    trials.run(GOOD)
    assert trials._helpers._idle == []


def test_no_more_helpers_than_seats() -> None:
    made: list[PlainTokens] = []

    def noted() -> PlainTokens:
        made.append(tokens())
        return made[-1]

    trials = Trials(noted)
    barrier = threading.Barrier(6)

    def ask(_: int) -> None:
        barrier.wait()
        trials.run(GOOD)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, range(6)))
    assert 1 <= len(made) <= MAX_HELPERS
    trials.close()


def test_the_library_in_the_driver_never_sees_a_description_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, compiler = create()
    compiler._trials = Trials(tokens, Limits(seconds=0.3))
    monkeypatch.setattr("heddle.engine.grammar.compiler.Grammar", None)
    form = describe(json={"allOf": [{"type": "string", "pattern": f"a{{{n}}}"} for n in range(99)]})
    with pytest.raises(RequestError, match=r"json cannot be followed: .*more than 0\.3 s") as found:
        compiler.compile(form)
    assert found.value.code == "invalid_grammar"
    compiler.close()


def test_helpers_end_with_their_engine_and_with_the_driver() -> None:
    before = helpers()
    tokenizer, _ = BOTH["bytes"]
    closed = GrammarCompiler(tokenizer, tokenizer.vocab_size, (EOS,))
    closed.compile(describe(regex="a"))
    assert len(helpers()) == len(before) + 1
    closed.close()
    closed.close()
    assert helpers() == before
    lost = GrammarCompiler(tokenizer, tokenizer.vocab_size, (EOS,))
    lost.compile(describe(regex="a"))
    (own,) = set(helpers()) - set(before)
    del lost
    gc.collect()
    assert not own.is_running()


def test_a_helper_whose_driver_has_gone_ends(trials: Trials) -> None:
    trials.run(GOOD)
    helper = trials._helpers._idle.pop()
    helper._connection.close()
    assert helper._process.wait(30) == 0


def test_no_room_for_a_helper_is_a_refusal(monkeypatch: pytest.MonkeyPatch, trials: Trials) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(helper_process.subprocess, "Popen", fail)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RequestError, match="no more processes") as found:
        trials.run(GOOD)
    assert found.value.code == "invalid_grammar"
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_helper_that_does_not_start_is_a_refusal(
    monkeypatch: pytest.MonkeyPatch, trials: Trials
) -> None:
    monkeypatch.setattr(helper_process, "interpreter_command", lambda *_: ["/bin/false"])
    began = time.monotonic()
    with pytest.raises(RequestError, match="did not start"):
        trials.run(GOOD)
    assert time.monotonic() - began < helper_process.START_SECONDS
