"""The command: what it reads and prints, and how it refuses."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from heddle.cli.main import main
from heddle.simulator.outcome import Job
from heddle.simulator.sweep import run_jobs

FAST = "qwen3-0.6b --device H200 --max-model-len 4096 --kv-cache-memory-bytes 128M"
MADE_UP = "--synthetic poisson --requests 30 --rate 20 --prompt-len 300 --output-len 10"


def simulate(capsys: pytest.CaptureFixture[str], words: str) -> tuple[int, str, str]:
    code = main(["simulate", *shlex.split(words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def document_of(capsys: pytest.CaptureFixture[str], words: str) -> dict[str, Any]:
    code, out, err = simulate(capsys, f"{words} --no-bounds --json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def write(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    found = document_of(capsys, f"{FAST} -tp 2 -dcp 2 {MADE_UP} --ttft 1 --tpot 0.1")
    assert found["schema"] == "heddle-simulate/1"
    assert (found["device"]["name"], found["device"]["devices"]) == ("H200", 2)
    assert (found["layout"]["tp"], found["layout"]["dcp"]) == (2, 2)
    assert (found["requests"], found["finished"], found["rejects"]) == (30, 30, 0)
    assert found["bounds"] is None
    assert found["sweep"] == []
    assert found["targets"] == {"ttft": 1.0, "tpot": 0.1, "kept_share": 1.0}
    again = document_of(capsys, f"{FAST} -tp 2 -dcp 2 {MADE_UP} --ttft 1 --tpot 0.1")
    assert {**again, "wall_s": 0} == {**found, "wall_s": 0}


def test_people_get_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = simulate(capsys, f"{FAST} {MADE_UP} --no-bounds --ttft 1")
    assert (code, err) == (0, "")
    assert len(out.splitlines()) < 40
    for words in ("first token", "between tokens", "finished 30", "waited:", "heddle serve qwen3"):
        assert words in out
    assert "100.0% of requests kept ttft 1 s" in out
    assert "not calibrated" in out


def test_traces_of_several_forms_are_served(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mooncake = [
        {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 9000, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
    ]
    path = write(tmp_path, "m.jsonl", "\n".join(map(json.dumps, mooncake)))
    found = document_of(capsys, f"{FAST} --trace {path}")
    assert found["hit_rate"] == 599 / 1200
    assert found["trace"]["seconds"] == 9.0
    path = write(
        tmp_path,
        "a.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n",
    )
    assert document_of(capsys, f"{FAST} --trace {path}")["finished"] == 2
    path = write(tmp_path, "lengths.json", "[[100, 5], [9999999, 5], [120, 7]]")
    found = document_of(capsys, f"{FAST} --trace {path}")
    assert (found["finished"], found["reject_reasons"]["too_long"]) == (2, 1)
    assert any("has no times" in note for note in found["notes"])
    assert document_of(capsys, f"{FAST} --trace {path} --requests 1 --rate 2")["requests"] == 1


def test_nothing_served_is_a_failure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = write(tmp_path, "long.json", "[[10000000, 5]]")
    code, out, _ = simulate(capsys, f"{FAST} --trace {path} --json")
    assert code == 1
    found = json.loads(out)
    assert (found["finished"], found["rejects"], found["ttft"]) == (0, 1, None)
    code, out, _ = simulate(capsys, f"{FAST} --trace {path} --no-bounds")
    assert code == 1
    assert "1 too long" in out


def test_a_small_pool_preempts_and_says_what_was_short(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = MADE_UP.replace("--output-len 10", "--output-len 400").replace(
        "--rate 20", "--rate 200"
    )
    found = document_of(capsys, f"{FAST} {words}")
    assert found["preemptions"] > 0
    assert found["limited_by"]["blocks"] > 0.3
    assert max(found["series"]["kv_share"]) > 0.9
    roomy = document_of(capsys, f"{FAST} {words} --kv-cache-memory-bytes 4G")
    assert (roomy["preemptions"], roomy["limited_by"]["blocks"]) == (0, 0.0)


def test_without_degrees_the_plan_chooses_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = document_of(capsys, f"{FAST} --devices 2 {MADE_UP}")
    assert found["layout"]["world_size"] <= 2
    assert "no degrees were given" in found["notes"][0]


@pytest.mark.dist
def test_a_sweep_compares_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    found = document_of(capsys, f"{FAST} --devices 2 {MADE_UP} --sweep")
    assert 2 < len(found["sweep"]) <= 12
    assert found["sweep"][0]["layout"] == found["layout"]
    assert found["sweep"][0]["tok_s"] == found["tok_s"]
    assert found["sweep"][0]["on_front"]
    code, out, _ = simulate(capsys, f"{FAST} --devices 2 -pcp 1 {MADE_UP} --sweep")
    assert code == 0
    assert "tokens/s/device" in out


def test_a_sweep_prints_the_layout_that_it_lists_first_though_others_are_as_fast(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def alike(jobs: Sequence[Job]) -> list[dict[str, Any]]:
        """Answers of one rate, each with earlier tokens than the one before it."""
        answers = run_jobs(jobs, num_processes=1)
        for number, answer in enumerate(answers):
            answer["tok_s"] = answer["tok_s_per_device"] = 1.0
            for name in ("ttft", "itl"):
                answer[name]["p99"] = 1 / (number + 1)
        return answers

    monkeypatch.setattr("heddle.simulator.sweep.run_jobs", alike)
    found = document_of(capsys, f"{FAST} --devices 2 {MADE_UP} --sweep")
    best, *others = found["sweep"]
    assert others
    assert best["on_front"]
    assert not any(entry["on_front"] for entry in others)
    for name in ("layout", "flags", "itl", "ttft"):
        assert found[name] == best[name]


@pytest.mark.dist
def test_bounds_come_unasked_with_few_requests(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = simulate(capsys, f"{FAST} {MADE_UP} --json")
    found = json.loads(out)
    assert code == 0
    for name in ("ttft", "e2e"):
        least, most = found["bounds"][name]["p50"]
        assert least < found[name]["p50"] < most
    code, out, _ = simulate(capsys, f"{FAST} {MADE_UP}")
    assert "99% within" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "neither was given; requests come from one of --trace FILE and --synthetic KIND"),
        ("--trace x.csv --synthetic chat", "both were given"),
        ("--trace none.csv", "trace='none.csv' cannot be read"),
        ("--synthetic storm", "legal here: poisson, bursts, chat, agent"),
        ("--synthetic chat --rate 0", "rate=0.0 is not legal"),
        ("--synthetic chat --rate nan", "rate=nan is not legal"),
        ("--synthetic chat --requests 0", "requests=0 is not legal"),
        ("--synthetic chat --ttft -1", "ttft=-1.0 is not legal"),
        ("--synthetic chat --tpot inf", "tpot=inf is not legal"),
        ("--synthetic chat --devices 1 -tp 2", "devices=1 is not legal with a layout of 2 ranks"),
        ("--synthetic chat --devices 0", "devices=0 is not legal"),
        ("--synthetic chat -tp 4 -dcp 3", "DCP must divide PCP"),
        ("--synthetic chat --target-itl 0", "target_itl=0.0 is not legal"),
    ],
)
def test_what_is_wrong_is_said_in_words(
    capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    code, out, err = simulate(capsys, f"qwen3-0.6b --device H200 {words}")
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_lengths_have_no_effect_on_a_trace(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = write(tmp_path, "a.json", "[[100, 5]]")
    code, _, err = simulate(capsys, f"{FAST} --trace {path} --prompt-len 8")
    assert code == 2
    assert "prompt_len=8 has no effect on a trace" in err


def test_settings_of_the_scheduler_have_an_effect(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{FAST} {MADE_UP} --rate 500"
    plain = document_of(capsys, words)
    for flags in ("--max-num-seqs 1", "--max-num-batched-tokens 64", "--target-itl 0.5"):
        changed = document_of(capsys, f"{words} {flags}")
        assert changed["ttft"] != plain["ttft"], flags
        assert flags in changed["flags"]
    assert "--target-itl" not in plain["flags"]
    found = document_of(capsys, f"{words} --max-num-seqs 1 --max-num-queued-reqs 2")
    assert found["reject_reasons"]["queue_full"] > 0


def test_no_tensor_library_is_loaded() -> None:
    import subprocess

    code = (
        "import sys; from heddle.cli.main import main; "
        "main('simulate qwen3-0.6b --device H200 --no-bounds --synthetic poisson --requests 2"
        " --json'.split()); print(sorted({'torch', 'transformers', 'numba'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
