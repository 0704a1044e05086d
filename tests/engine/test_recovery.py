"""Real ranks in threads: answers over ranks that fail are those over ranks that do not.

One batch of requests with everything that they may ask for is run once undisturbed, and once for
each moment at which a rank raises. Log-probabilities of a replayed position come from a prefill
instead of a decode, so their last bits may differ; texts may not.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from heddle import LLM, RequestError, SamplingParams
from heddle.config.sampling import RequestOutputKind
from heddle.engine import room
from heddle.engine.args import engine_config
from heddle.engine.executors.base import Executor
from heddle.engine.executors.threads import ThreadsExecutor
from heddle.engine.executors.wrapped import WrappedExecutor
from heddle.engine.inputs import PromptInput
from heddle.engine.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from heddle.errors import ConfigError, ModelFileError, RankFailed
from heddle.step.batch import GlobalBatch, RankReply
from tests.support.adapters import low_rank, save_adapter
from tests.support.byte_tokenizer import printable, save_folder
from tests.support.tiny import build_tiny

LONG = [3 + (5 * i) % 90 for i in range(45)]
SHORT = [3 + i % 7 for i in range(20)]
RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP 2 DCP 2": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    "PCP 2 DCP 2": {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2},
    "two stages, two replicas": {"pipeline_parallel_size": 2, "data_parallel_size": 2},
}
ASKED: dict[str, tuple[list[int], SamplingParams, str | None]] = {
    "greedy": (LONG, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), None),
    "seeded": (SHORT, SamplingParams(seed=3, max_tokens=20, ignore_eos=True, top_p=0.9), None),
    "without a seed": (SHORT[:5], SamplingParams(max_tokens=12, ignore_eos=True), None),
    "several answers": (LONG[:9], SamplingParams(seed=5, n=3, max_tokens=9), None),
    "log-probabilities": (
        SHORT[:7],
        SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, prompt_logprobs=1),
        None,
    ),
    "a form": (
        LONG[:17],
        SamplingParams(temperature=0.0, max_tokens=60, structured_outputs={"json": RECORD}),
        None,
    ),
    "penalties": (
        SHORT,
        SamplingParams(
            temperature=0.0,
            max_tokens=16,
            ignore_eos=True,
            repetition_penalty=1.3,
            presence_penalty=0.4,
            min_tokens=3,
            bad_words=["ab"],
        ),
        None,
    ),
    "an adapter": (LONG[:30], SamplingParams(temperature=0.0, max_tokens=14), "a"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = build_tiny(tmp_path_factory.mktemp("model"), "llama-6-2")
    save_adapter(path.parent / "a", low_rank("model.layers.1.mlp.down_proj", 72, 100))
    return save_folder(path, printable(), eos_token="<|end|>")


class Failing(WrappedExecutor):
    """One rank raises in one step; its successors are let alone."""

    def __init__(self, inner: Executor, step: int | None, rank: int = 1) -> None:
        super().__init__(inner)
        self._step, self._rank = step, rank

    def start(self) -> None:
        super().start()
        if self._step is None:
            return
        assert isinstance(self.inner, ThreadsExecutor)
        worker = self.inner.workers[self._rank]
        execute = worker.execute

        def fail(batch: GlobalBatch, digest: int, deadline: float | None) -> RankReply:
            if batch.step == self._step:
                raise ValueError("boom")
            return execute(batch, digest, deadline)

        worker.execute = fail  # type: ignore[method-assign]


class Engine:
    """An LLM whose ranks fail once in each of some epochs."""

    def __init__(self, folder: Path, *failing_steps: int, rank: int = 1, **settings: Any) -> None:
        self._steps = iter(failing_steps)
        self._rank = rank
        options: dict[str, Any] = {
            "executor": "threads",
            "block_size": 4,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "num_gpu_blocks_override": 60,
            "enable_lora": True,
            "lora_modules": {"a": str(folder.parent / "a")},
            "enforce_eager": True,
        }
        config = engine_config(str(folder), **(options | settings))
        self.llm = LLM.from_config(config, watch=self._watch)

    def _watch(self, executor: Executor) -> Executor:
        return Failing(executor, next(self._steps, None), self._rank)

    def __enter__(self) -> LLM:
        return self.llm

    def __exit__(self, *_: object) -> None:
        self.llm.close()


def ask_all(llm: LLM) -> dict[str, RequestOutput]:
    outputs = llm.generate(
        [prompt for prompt, _, _ in ASKED.values()],
        [params for _, params, _ in ASKED.values()],
        lora_request=[adapter for _, _, adapter in ASKED.values()],
        use_tqdm=False,
    )
    llm.driver.audit()
    return dict(zip(ASKED, outputs, strict=True))


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, RequestOutput]:
    """Of one rank that never fails."""
    with Engine(folder, executor="inline") as llm:
        return ask_all(llm)


def check(found: dict[str, RequestOutput], expected: dict[str, RequestOutput]) -> None:
    assert set(found) == set(expected) == set(ASKED)
    for name, output in found.items():
        wanted = expected[name]
        assert output.error is None, name
        pairs = list(zip(output.outputs, wanted.outputs, strict=True))
        assert pairs
        for answer, other in pairs:
            assert plain(answer) == plain(other), name
            check_logprobs(answer.logprobs, other.logprobs)
        check_logprobs(output.prompt_logprobs, wanted.prompt_logprobs)


def plain(answer: CompletionOutput) -> CompletionOutput:
    return dataclasses.replace(answer, logprobs=None, cumulative_logprob=None)


def check_logprobs(
    found: tuple[PositionLogprobs | None, ...] | None,
    wanted: tuple[PositionLogprobs | None, ...] | None,
) -> None:
    assert (found is None) == (wanted is None)
    for here, there in zip(found or (), wanted or (), strict=True):
        assert (here is None) == (there is None)
        for token_id, entry in (here or {}).items():
            other = (there or {})[token_id]
            assert math.isclose(entry.logprob, other.logprob, rel_tol=1e-4, abs_tol=1e-4)
            assert entry.rank == other.rank


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("steps", [(0,), (2,), (7,), (11, 3)], ids=str)
def test_answers_are_those_of_ranks_that_do_not_fail(
    folder: Path, expected: dict[str, RequestOutput], layout: str, steps: tuple[int, ...]
) -> None:
    with Engine(folder, *steps, **LAYOUTS[layout]) as llm:
        check(ask_all(llm), expected)
        assert llm.plan.epoch == len(steps)
        assert llm.get_metrics()["recoveries"] == len(steps)


def test_drafts_are_made_anew(folder: Path, expected: dict[str, RequestOutput]) -> None:
    settings = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    with Engine(folder, 6, **LAYOUTS["TP 2 DCP 2"], **settings) as llm:
        check(ask_all(llm), expected)
        assert llm.get_metrics()["drafts"] > 0
        assert llm.plan.epoch == 1


def test_one_rank_in_the_callers_thread_is_made_anew_too(
    folder: Path, expected: dict[str, RequestOutput]
) -> None:
    with Engine(folder, executor="inline") as llm:
        worker = llm.driver.executor.inner.workers[0]  # type: ignore[attr-defined]
        execute, seen = worker.execute, []

        def fail(*arguments: Any) -> RankReply:
            seen.append(arguments)
            if len(seen) == 5:
                raise ValueError("boom")
            reply: RankReply = execute(*arguments)
            return reply

        worker.execute = fail
        check(ask_all(llm), expected)
        assert llm.plan.epoch == 1


def deltas(llm: LLM, prompt: list[int], params: SamplingParams) -> Iterator[RequestOutput]:
    request_id = llm.driver.add(
        prompt_of(prompt), dataclasses.replace(params, output_kind=RequestOutputKind.DELTA)
    )
    while llm.driver.has_work:
        for output in llm.driver.step():
            assert output.request_id == request_id
            yield output


def finish(llm: LLM) -> dict[str, RequestOutput]:
    """The last outputs of open requests."""
    ended = {}
    while llm.driver.has_work:
        ended |= {output.request_id: output for output in llm.driver.step() if output.finished}
    return ended


def prompt_of(ids: list[int]) -> PromptInput:
    return PromptInput(token_ids=tuple(ids))


def test_a_stream_repeats_and_loses_nothing(
    folder: Path, expected: dict[str, RequestOutput]
) -> None:
    wanted = expected["greedy"].outputs[0]
    with Engine(folder, 9, 4, **LAYOUTS["TP 2 DCP 2"]) as llm:
        pieces = [output.outputs[0] for output in deltas(llm, LONG, ASKED["greedy"][1])]
        assert llm.plan.epoch == 2
    assert "".join(piece.text for piece in pieces) == wanted.text
    assert [id_ for piece in pieces for id_ in piece.token_ids] == list(wanted.token_ids)
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]


def test_a_stop_string_across_the_failure_is_found(
    folder: Path, expected: dict[str, RequestOutput]
) -> None:
    text = expected["greedy"].outputs[0].text
    at = 8  # the first half is drawn by the old ranks, the second by the new ones
    stop = text[at - 2 : at + 2]
    assert text.index(stop) == at - 2
    params = SamplingParams(temperature=0.0, max_tokens=20, stop=[stop])
    with Engine(folder, 1 + at, **LAYOUTS["TP 2 DCP 2"]) as llm:
        (output,) = llm.generate([LONG], params, use_tqdm=False)
        assert llm.plan.epoch == 1
    assert output.outputs[0].text == text[: at - 2]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)


def test_times_and_counts_are_those_of_the_first_life(folder: Path) -> None:
    with Engine(folder, 8, **LAYOUTS["TP 2 DCP 2"]) as llm:
        first = last = None
        for output in deltas(llm, LONG, ASKED["greedy"][1]):
            first = first or output
            last = output
            assert output.metrics.first_token_time == first.metrics.first_token_time
        assert last is not None
        assert last.finished
        assert llm.plan.epoch == 1
        totals = llm.get_metrics()
        assert (totals["prompt_tokens"], totals["generation_tokens"]) == (len(LONG), 20)
        assert totals["requests_length"] == 1
        assert last.metrics.num_preemptions == 0


def test_what_was_found_in_the_cache_stays_told(folder: Path) -> None:
    with Engine(folder, 12, **LAYOUTS["TP 2 DCP 2"]) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        llm.generate([LONG], params, use_tqdm=False)
        again = llm.generate([LONG], params, use_tqdm=False)
        assert llm.plan.epoch == 1
        assert again[0].num_cached_tokens >= 32
        assert llm.generate([LONG], params, use_tqdm=False)[0].num_cached_tokens > 0


def test_an_adapter_that_was_loaded_later_is_there_on_new_ranks(
    folder: Path, expected: dict[str, RequestOutput]
) -> None:
    prompt, params, _ = ASKED["an adapter"]
    settings = {"lora_modules": {}, "lora_dir": str(folder.parent), "max_loras": 2}
    with Engine(folder, 3, **LAYOUTS["TP 2 DCP 2"], **settings) as llm:
        llm.load_adapter("late", "a")
        (output,) = llm.generate([prompt], params, lora_request="late", use_tqdm=False)
        assert llm.plan.epoch == 1
        assert output.outputs[0].text == expected["an adapter"].outputs[0].text


def test_without_restarts_a_failure_ends_the_engine(folder: Path) -> None:
    with Engine(folder, 2, max_restarts=0, **LAYOUTS["TP 2 DCP 2"]) as llm:
        with pytest.raises(RankFailed, match=r"rank1 .* failed in step 2 of epoch 0: .*boom"):
            llm.generate([LONG], SamplingParams(max_tokens=8), use_tqdm=False)
        with pytest.raises(RankFailed, match="the engine has failed: rank1"):
            llm.generate([SHORT], SamplingParams(max_tokens=8), use_tqdm=False)


def test_a_spent_budget_ends_the_engine_by_the_last_cause(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "heddle.engine"),
        Engine(folder, 2, 2, max_restarts=1, **LAYOUTS["TP 2 DCP 2"]) as llm,
        pytest.raises(RankFailed, match=r"failed in step 2 of epoch 1: .*boom"),
    ):
        llm.generate([LONG], SamplingParams(max_tokens=8), use_tqdm=False)
    said = [(r.levelname, r.getMessage().partition("\n")[0]) for r in caplog.records]
    levels = [level for level, _ in said]
    assert levels == ["WARNING", "INFO", "INFO", "ERROR"]
    assert said[0][1].endswith("ValueError: boom; ranks are started anew (1 of 1 restarts)")
    assert said[2][1].startswith("recovered in ")
    assert said[2][1].endswith(" s: 1 request goes on")
    assert said[3][1].endswith("; ranks failed 2 times within 600 s, max_restarts is 1")


def test_a_request_that_ranks_fail_of_is_found_and_refused(
    folder: Path, expected: dict[str, RequestOutput]
) -> None:
    """Ranks raise on the rows of one prompt, however often they are made anew."""
    poison = [9] * 11

    class Poisoned(WrappedExecutor):
        def start(self) -> None:
            super().start()
            assert isinstance(self.inner, ThreadsExecutor)
            worker = self.inner.workers[0]
            execute = worker.execute

            def fail(batch: GlobalBatch, digest: int, deadline: float | None) -> RankReply:
                if any(request.token_ids[:4] == (9, 9, 9, 9) for request in batch.requests):
                    raise ValueError("boom")
                return execute(batch, digest, deadline)

            worker.execute = fail  # type: ignore[method-assign]

    config = engine_config(str(folder), executor="threads", max_restarts=2, **LAYOUTS["TP 2 DCP 2"])
    params = ASKED["greedy"][1]
    with LLM.from_config(config, watch=Poisoned) as llm:
        outputs = llm.generate([LONG, poison, SHORT], params, use_tqdm=False)
        assert [output.error is None for output in outputs] == [True, False, True]
        error = outputs[1].error
        assert error is not None
        assert error.code == "generation_failed"
        assert outputs[0].outputs[0].text == expected["greedy"].outputs[0].text
        assert llm.plan.epoch == 3
        with pytest.raises(RequestError, match="refused for") as refusal:
            llm.generate(poison, params, use_tqdm=False)
        assert refusal.value.code == "generation_failed"
        assert llm.plan.epoch == 3
        assert llm.get_metrics()["requests_condemned"] == 1


def test_max_restarts_is_a_whole_number() -> None:
    for wrong in (-1, 1.5, True, None):
        with pytest.raises(ConfigError, match="max_restarts="):
            engine_config("demo", max_restarts=wrong)


class Taking(WrappedExecutor):
    """Its ranks raise when they take in an adapter of one folder."""

    path = ""

    def start(self) -> None:
        super().start()
        assert isinstance(self.inner, ThreadsExecutor)
        worker = self.inner.workers[1]
        execute = worker.execute

        def fail(batch: GlobalBatch, digest: int, deadline: float | None) -> RankReply:
            if any(change.path == self.path for change in batch.adapter_changes):
                raise ValueError("boom")
            return execute(batch, digest, deadline)

        worker.execute = fail  # type: ignore[method-assign]


@pytest.fixture
def own(folder: Path, tmp_path: Path) -> dict[str, Any]:
    """Settings of an engine whose adapters `a` and `b` a test may change."""
    for name in ("a", "b"):
        shutil.copytree(folder.parent / "a", tmp_path / "adapters" / name)
    return {
        "executor": "threads",
        "block_size": 4,
        "enable_lora": True,
        "max_loras": 2,
        "lora_dir": str(tmp_path / "adapters"),
        **LAYOUTS["TP 2 DCP 2"],
    }


def test_an_adapter_that_ranks_die_of_is_dropped_and_the_engine_goes_on(
    folder: Path, own: dict[str, Any], expected: dict[str, RequestOutput]
) -> None:
    prompt, params, _ = ASKED["an adapter"]
    wanted = expected["an adapter"].outputs[0].text
    config = engine_config(str(folder), max_restarts=1, **own)
    with LLM.from_config(config, watch=Taking) as llm:
        Taking.path = str(Path(own["lora_dir"]) / "b")
        llm.load_adapter("good", "a")
        for epoch in (2, 4, 6):  # each time one fault more than restarts are allowed
            with pytest.raises(ModelFileError, match=r"'bad' is not loaded: ranks failed each"):
                llm.load_adapter("bad", "b")
            assert llm.plan.epoch == epoch
        assert llm.driver.adapters.names == ("good",)
        (output,) = llm.generate([prompt], params, lora_request="good", use_tqdm=False)
        assert output.outputs[0].text == wanted


def test_requests_of_an_adapter_that_ranks_die_of_end_and_others_go_on(
    folder: Path, own: dict[str, Any], expected: dict[str, RequestOutput]
) -> None:
    """It is loaded while a request runs, so that the next step of requests brings it."""
    prompt, params, _ = ASKED["greedy"]
    config = engine_config(str(folder), max_restarts=1, **own)
    with LLM.from_config(config, watch=Taking) as llm:
        Taking.path = str(Path(own["lora_dir"]) / "b")
        driver = llm.driver
        neighbour = driver.add(prompt_of(prompt), params)
        driver.step()
        driver.load_adapter("bad", "b")
        user = driver.add(prompt_of(SHORT), params, adapter="bad")
        ended = finish(llm)
        assert ended[neighbour].outputs[0].text == expected["greedy"].outputs[0].text
        error = ended[user].error
        assert error is not None
        assert error.code == "generation_failed"
        assert "its adapter 'bad' is dropped: ranks failed when they took it in" in str(error)
        assert llm.plan.epoch == 2
        with pytest.raises(RequestError, match="no adapter is called 'bad'"):
            driver.add(prompt_of(SHORT), params, adapter="bad")
        driver.audit()


def test_an_adapter_with_other_files_is_dropped_and_its_requests_end(
    folder: Path, own: dict[str, Any], expected: dict[str, RequestOutput]
) -> None:
    prompt, params, _ = ASKED["greedy"]
    changed = Path(own["lora_dir"]) / "a"
    modules = {"a": str(changed), "b": str(changed.parent / "b")}
    with Engine(folder, 6, lora_modules=modules, **own) as llm:
        driver = llm.driver
        names = {
            driver.add(prompt_of(prompt), params, adapter=adapter): adapter
            for adapter in (None, "a", "b")
        }
        driver.step()
        save_adapter(changed, low_rank("model.layers.1.mlp.down_proj", 72, 100, seed=1))
        ended = finish(llm)
        assert llm.plan.epoch == 1
        found = {names[request_id]: output for request_id, output in ended.items()}
        assert found[None].outputs[0].text == expected["greedy"].outputs[0].text
        assert found[None].error is found["b"].error is None
        error = found["a"].error
        assert error is not None
        assert f"has other files than when it was loaded ({changed}" in str(error)
        assert "load it again" in str(error)
        assert driver.adapters.names == ("b",)
        driver.load_adapter("a", "a")
        (output,) = llm.generate([prompt], params, lora_request="a", use_tqdm=False)
        assert output.error is None


@pytest.mark.parametrize("layout", ["TP 2 DCP 2", "two stages, two replicas"])
def test_another_checkpoint_is_not_gone_on_with(folder: Path, tmp_path: Path, layout: str) -> None:
    model = shutil.copytree(folder, tmp_path / "model")
    with Engine(model, 3, enable_lora=False, lora_modules={}, **LAYOUTS[layout]) as llm:
        request_id = llm.driver.add(prompt_of(LONG), ASKED["greedy"][1])
        llm.driver.step()
        build_tiny(tmp_path / "other", "llama-6-2", seed=1).rename(tmp_path / "new")
        for file in (tmp_path / "new").iterdir():
            file.replace(model / file.name)
        with pytest.raises(ModelFileError, match=r"config.json was written or replaced\)"):
            finish(llm)
        with pytest.raises(RankFailed, match=r"failed: the checkpoint is not the one that the"):
            llm.driver.step()
        assert llm.driver._states[request_id].sequences[0].output_token_ids
        assert llm.plan.epoch == 0


@pytest.mark.parametrize("missing_bytes", [0, 1])
def test_threads_are_started_anew_only_where_there_is_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch, missing_bytes: int
) -> None:
    with Engine(folder, 3, **LAYOUTS["TP 2 DCP 2"]) as llm:
        needed = room.weigh_ranks(llm.plan)
        monkeypatch.setattr(room, "free_memory_bytes", lambda: needed - missing_bytes)
        if missing_bytes:
            words = f"take {needed:,} bytes, and {needed - 1:,} bytes of memory are free; a thread"
            with pytest.raises(ConfigError, match=words):
                llm.generate([LONG], ASKED["greedy"][1], use_tqdm=False)
        else:
            llm.generate([LONG], ASKED["greedy"][1], use_tqdm=False)
        assert llm.plan.epoch == 1 - missing_bytes


def test_a_thread_that_raised_leaves_no_pool_behind(folder: Path) -> None:
    settings = {"enable_fault_injection": True, "faults": "raise(1,decode,3)"}
    with Engine(folder, **settings, **LAYOUTS["TP 2 DCP 2"]) as llm:
        executor = llm.driver.executor.inner  # type: ignore[attr-defined]
        pools = [weakref.ref(worker.store) for worker in executor.workers]
        del executor
        left: list[int] = []
        create = llm._executors.next

        def look(resolved: Any) -> Executor:
            gc.collect()
            left.append(sum(pool() is not None for pool in pools))
            return create(resolved)

        llm.driver._recovery._restarts._create = look  # type: ignore[union-attr]
        llm.generate([LONG], ASKED["greedy"][1], use_tqdm=False)
        assert left == [0]
        assert llm.plan.epoch == 1
