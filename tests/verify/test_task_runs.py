from __future__ import annotations

import pytest

from heddle.config import EngineConfig, ParallelConfig
from heddle.errors import ConfigError
from heddle.models.config_json import load_model_config
from heddle.verify import task_runs
from heddle.verify.prompts import shipped_text
from heddle.verify.task_runs import Answer, run_task, task_document
from heddle.verify.trials import Trial
from tests.flagship.test_passkey import FOLDER

SHARED = ParallelConfig(prefill_context_parallel_size=2, decode_context_parallel_size=2)


def run(task, path=FOLDER, max_model_len=100, **changes):
    config = EngineConfig(
        model=str(path), executor="threads", max_model_len=max_model_len, **changes
    )
    lines = []
    report = run_task(
        task,
        config,
        load_model_config(path),
        [Trial(parallel=SHARED, block_size=4)],
        text=shipped_text(),
        report=lines.append,
    )
    assert len(lines) == 2
    return report


def test_a_trained_model_finds_the_keys_on_every_layout():
    report = run("passkey")
    assert report.ok
    document = task_document(report)
    assert (document["task"], document["num_prompts"], document["num_tokens"]) == (
        "passkey",
        16,
        94,
    )
    alone, shared = document["layouts"]
    assert (alone["pcp"], alone["dcp"], shared["pcp"], shared["dcp"]) == (1, 1, 2, 2)
    assert alone["accuracy"] == shared["accuracy"] > 0.8
    assert shared["same_answers"] is True


def test_a_perplexity_over_ranks_is_measured_in_chunks(monkeypatch):
    chunks = []
    ask = task_runs.text_perplexity

    def watched(llm, prompt):
        found = ask(llm, prompt)
        chunks.append([record.num_rows for record in llm.step_trace()])
        return found

    monkeypatch.setattr(task_runs, "text_perplexity", watched)
    report = run("perplexity")
    assert report.ok
    assert report.tolerance == 1e-5
    assert max(chunks[0]) == 99
    assert max(chunks[1]) == 33
    alone, shared = task_document(report)["layouts"]
    assert alone["difference"] == 0
    assert 0 <= shared["difference"] <= 1e-5
    assert shared["value"] == pytest.approx(alone["value"], rel=1e-5)


def test_another_answer_or_value_is_not_ok(monkeypatch):
    said = iter([(Answer((1,), "a"),) * 16, (Answer((2,), "a"),) * 16])
    monkeypatch.setattr(task_runs, "passkey_answers", lambda llm, asked: next(said))
    report = run("passkey")
    assert not report.ok
    assert [score.ok for _, score in report.scores] == [True, False]
    values = iter([10.0, 10.001])
    monkeypatch.setattr(task_runs, "text_perplexity", lambda llm, prompt: next(values))
    report = run("perplexity")
    assert not report.ok
    assert report.scores[1][1].difference == pytest.approx(1e-4)
    values = iter([10.0, 10.001])
    assert run("perplexity", dtype="bfloat16").ok


def test_a_model_without_a_tokenizer_is_refused(tiny_path):
    with pytest.raises(ConfigError, match="has no tokenizer"):
        run("perplexity", path=tiny_path)
