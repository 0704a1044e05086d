"""Live rows of every layout are those of one rank; one that is not is found, its place named."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from heddle import LLM, SamplingParams
from heddle.attention.backends.base import AttentionBackend
from heddle.attention.state import AttentionState
from heddle.engine.shadow.shadow import QUEUE_LENGTH, Shadow
from heddle.errors import ConfigError, RankFailed
from heddle.step.probe import Probed
from tests.support.processes import LONG_SECONDS, seconds_until
from tests.support.tiny import VOCAB_SIZE, build_tiny

PROMPTS = [[(11 * i + 3 * n) % 120 + 3 for i in range(n)] for n in (23, 3, 9)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("shadow"), "llama-8-2")


def load(folder: Path, **changes: Any) -> LLM:
    settings = {
        "executor": "threads",
        "num_gpu_blocks_override": 64,
        "block_size": 4,
        "verify_every": 1,
        "max_model_len": 200,
        "num_threads": 1,
        "kernels": "torch",
        **changes,
    }
    return LLM(str(folder), **settings)


def run(llm: LLM, count: int = 6, **params: Any) -> list[tuple[int, ...]]:
    given = {"temperature": 0.0, "max_tokens": count, "ignore_eos": True, **params}
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        SamplingParams(**given),
        use_tqdm=False,
    )
    return [output.outputs[0].token_ids for output in outputs]


def shadow_of(llm: LLM) -> Shadow:
    assert llm.shadow is not None
    return llm.shadow


LAYOUTS = [
    {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2},
    {"tensor_parallel_size": 2, "prefill_context_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"data_parallel_size": 2, "tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    {
        "tensor_parallel_size": 2,
        "decode_context_parallel_size": 2,
        "speculative_config": {"num_speculative_tokens": 2, "prompt_lookup_min": 1},
    },
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_right_steps_raise_no_alarm(folder: Path, layout: dict[str, Any]) -> None:
    with load(folder, verify_every=2, **layout) as llm:
        run(llm)
        run(llm, temperature=0.8, seed=3)
        shadow_of(llm).wait()
        counts = shadow_of(llm).counts
        assert counts["mismatch"] == counts["failed"] == counts["skipped"] == 0
        assert counts["ok"] >= 3


class StaleLse:
    """A backend that, from some call on, answers with the lse of the call before."""

    def __init__(self, inner: AttentionBackend, after: int) -> None:
        self._inner, self._left = inner, after
        self._last: dict[torch.Size, torch.Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def attend(self, *args: Any, **options: Any) -> AttentionState:
        state = self._inner.attend(*args, **options)
        before = self._last.get(state.lse.shape)
        self._last[state.lse.shape] = state.lse.clone()
        self._left -= 1
        return state if before is None or self._left > 0 else AttentionState(state.out, before)


def spoil(llm: LLM, rank: int, after: int = 1) -> None:
    worker = llm.driver.executor.workers[rank]  # type: ignore[attr-defined]
    stale = StaleLse(worker.resources.backend, after)
    object.__setattr__(worker.resources, "backend", stale)


def test_a_stale_lse_on_one_rank_is_found_at_the_next_look(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with load(
        folder,
        backend="torch",
        kernels="torch",
        tensor_parallel_size=2,
        decode_context_parallel_size=2,
    ) as llm:
        run(llm, 2)
        shadow_of(llm).wait()
        assert (shadow_of(llm).counts["mismatch"], shadow_of(llm).alarms) == (0, [])
        spoil(llm, 1)
        with caplog.at_level(logging.ERROR, logger="heddle.verify"):
            run(llm)
            shadow_of(llm).wait()
        alarms = shadow_of(llm).alarms
        assert shadow_of(llm).counts["mismatch"] == len(alarms) > 0
        first = alarms[0]
        assert first.layer in (0, 1)
        assert set(first.ranks) <= {0, 1}
        assert first.ranks
        assert first.difference > 10 * first.tolerance
        assert str(first) in caplog.text
        assert f"request {first.request}, token {first.position} of its answer" in str(first)


def test_a_rank_with_other_weights_is_named_with_its_layer(folder: Path) -> None:
    with load(folder, tensor_parallel_size=2, verify_every=3) as llm:
        worker = llm.driver.executor.workers[1]  # type: ignore[attr-defined]
        with torch.inference_mode():
            worker.model._layers[1].attention_norm.weight.mul_(1.3)
        run(llm)
        shadow_of(llm).wait()
        alarm = shadow_of(llm).alarms[0]
        assert (alarm.layer, alarm.ranks) == (1, (1,))
        assert "the first layer whose attention differs is 1, on ranks 1" in str(alarm)


def test_the_first_bad_token_of_a_greedy_answer_is_named(folder: Path) -> None:
    with load(folder, tensor_parallel_size=2, verify_every=1000) as llm:
        right = run(llm, 12)
    with load(folder, tensor_parallel_size=2, verify_every=4) as llm:
        worker = llm.driver.executor.workers[1]  # type: ignore[attr-defined]
        with torch.inference_mode():
            worker.model._layers[0].attention_norm.weight.mul_(4.0)
        wrong = run(llm, 12)
        shadow_of(llm).wait()
        found = {alarm.request: alarm for alarm in shadow_of(llm).alarms if alarm.first_bad}
        assert found
        for alarm in found.values():
            mine, theirs = wrong[int(alarm.request)], right[int(alarm.request)]
            first = next(
                i for i, pair in enumerate(zip(mine, theirs, strict=True)) if len({*pair}) == 2
            )
            bad = alarm.first_bad
            assert bad is not None
            assert (bad.position, bad.token_id, bad.wanted_id) == (
                first,
                mine[first],
                theirs[first],
            )


def test_rows_that_come_too_fast_are_dropped_and_counted(folder: Path) -> None:
    with load(folder, tensor_parallel_size=2) as llm:
        shadow = shadow_of(llm)
        taken, real = [], shadow._look

        def slow(*given: Any) -> None:
            taken.append(given)
            while not shadow.counts["dropped"]:
                time.sleep(0.001)
            real(*given)

        shadow._look = slow  # type: ignore[method-assign]
        run(llm, 12)
        shadow.wait()
        counts = shadow.counts
        assert counts["dropped"] > 0
        assert QUEUE_LENGTH <= counts["ok"] == len(taken)
        assert counts["ok"] + counts["dropped"] >= 12


def probed_of(token_ids: list[int]) -> Probed:
    """A row of nonsense after these tokens."""
    return Probed(
        request_id=0,
        epoch=0,
        step=0,
        token_ids=tuple(token_ids),
        num_prompt_tokens=len(token_ids),
        rope_length=len(token_ids),
        token_id=0,
        is_greedy=True,
        logits=bytes(4 * VOCAB_SIZE),
        layers={},
    )


def test_a_sequence_that_is_too_long_is_skipped_and_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(folder, tensor_parallel_size=2) as llm:
        shadow = shadow_of(llm)
        cache = shadow._golden.driver.replicas[0].cache
        assert cache.usable_tokens == shadow.max_tokens == 200
        with monkeypatch.context() as patch:
            patch.setattr(type(cache), "usable_tokens", property(lambda cache: 5))
            shadow.offer(probed_of([7] * 4), "1")
            shadow.offer(probed_of([7] * 5), "2")
        shadow.wait()
        assert (shadow.counts["skipped"], shadow.counts["mismatch"]) == (1, 1)


def test_narrow_types_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"verify_every=1 is not legal with .*int8 cache.*0\)"):
        load(folder, tensor_parallel_size=2, kv_cache_dtype="int8")


def test_one_rank_has_nothing_to_be_held_against(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"verify_every=1 is not legal with one rank"):
        load(folder)


def held(shadow: Shadow, release: threading.Event) -> threading.Event:
    """Have the golden engine stand in its first step until `release`; set once it does."""
    stands, step = threading.Event(), shadow._golden.driver.step

    def hold() -> Any:
        stands.set()
        assert release.wait(60)
        return step()

    shadow._golden.driver.step = hold  # type: ignore[method-assign]
    return stands


def test_an_end_waits_for_no_row(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those that wait are never begun, and the one in hand ends with the step that it is in."""
    with load(folder, tensor_parallel_size=2, max_num_batched_tokens=8) as llm:
        shadow, release = shadow_of(llm), threading.Event()
        num_steps, stands = [], held(shadow, release)
        step = shadow._golden.driver.step
        shadow._golden.driver.step = lambda: (num_steps.append(1), step())[1]  # type: ignore
        shadow.offer(probed_of([7] * 100), "1")  # 13 steps
        assert stands.wait(60)
        for _ in range(QUEUE_LENGTH + 1):
            shadow.offer(probed_of([7] * 100), "2")
        assert shadow.counts["dropped"] == 1
        closing = threading.Thread(target=llm.close)
        with caplog.at_level(logging.INFO, logger="heddle.verify"):
            closing.start()
            while shadow.counts["dropped"] == 1:
                time.sleep(0.001)
            release.set()
            closing.join(60)
        assert not closing.is_alive()
        assert len(num_steps) == 1
        assert shadow.counts["dropped"] == 1 + QUEUE_LENGTH + 1
        assert shadow.counts["ok"] == shadow.counts["failed"] == 0
        assert f"live checks end; {QUEUE_LENGTH + 1} rows had not been looked at" in caplog.text
        assert shadow.stopped == ""
        shadow.offer(probed_of([7] * 4), "3")
        shadow.wait()


@pytest.mark.parametrize("error", [RankFailed("rank0: gone"), SystemExit(3)], ids=["rank", "exit"])
def test_a_shadow_that_dies_is_said_to_and_the_engine_goes_on(
    folder: Path, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    with load(folder, tensor_parallel_size=2) as llm:
        shadow, release = shadow_of(llm), threading.Event()
        stands = held(shadow, release)

        def fail(*_: Any) -> None:
            raise error

        shadow._golden.driver.executor.submit = fail  # type: ignore[method-assign]
        for _ in range(QUEUE_LENGTH + 1):
            shadow.offer(probed_of([7] * 4), "1")
            assert stands.wait(60)
        with caplog.at_level(logging.ERROR, logger="heddle.verify"):
            release.set()
            shadow.wait()
            assert seconds_until(lambda: not shadow._thread.is_alive()) < LONG_SECONDS
        assert shadow.counts["failed"] == QUEUE_LENGTH + 1
        assert shadow.stopped.startswith(f"{type(error).__name__}: ")
        assert str(error) in shadow.stopped
        (said,) = [line for line in caplog.messages if "live checks have stopped" in line]
        assert shadow.stopped in said
        assert [len(ids) for ids in run(llm)] == [6, 6, 6]
        assert shadow.counts["failed"] > QUEUE_LENGTH + 1  # each row that was to be looked at
        shadow.wait()


def test_a_shadow_that_dies_without_a_row_is_missed_too(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with load(folder, tensor_parallel_size=2) as llm:
        shadow = shadow_of(llm)

        def gone() -> None:
            raise RankFailed("rank0 was killed by SIGKILL while idle")

        with caplog.at_level(logging.ERROR, logger="heddle.verify"):
            shadow._golden.driver.executor.check = gone  # type: ignore[method-assign]
            assert seconds_until(lambda: bool(shadow.stopped)) < LONG_SECONDS
            assert seconds_until(lambda: not shadow._thread.is_alive()) < LONG_SECONDS
        assert "killed by SIGKILL while idle" in shadow.stopped
        assert "live checks have stopped, and the engine goes on without" in caplog.text
