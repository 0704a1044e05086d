"""The command: what it reads, what it prints, and that an engine with its flags is what it said."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path

import pytest

from heddle.cli import generate
from heddle.cli.flags import engine_arguments
from heddle.cli.main import main
from heddle.cli.output import Output
from heddle.engine.args import engine_config
from heddle.engine.llm import LLM
from heddle.server.config import ServerConfig
from heddle.server.startup_lines import opening_lines

SMALL = "--devices 4 --prompt-len 100 --output-len 8 --concurrency 2 --kv-cache-memory-bytes 4M"
SMALL += " --max-num-batched-tokens 64 --block-size 4"


def plan(capsys, words: str) -> tuple[int, str, str]:
    code = main(["plan", *shlex.split(words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def document_of(capsys, words: str) -> dict:
    code, out, err = plan(capsys, f"{words} --json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_one_json_document(capsys) -> None:
    found = document_of(capsys, "qwen3-0.6b --device h200 --devices 2 --prompt-len 8k")
    assert found["model"]["name"] == "qwen3-0.6b"
    assert found["device"]["name"] == "H200"
    assert found["device"]["dtype"] == "bfloat16"
    assert found["workload"]["prompt_len"] == 8000
    assert found["candidates"]
    assert found["recommended"]


def test_people_get_a_screen(capsys) -> None:
    code, out, err = plan(capsys, "llama-3.1-70b --device H200 --devices 8 --prompt-len 32K")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) < 100
    assert max(len(line) for line in lines if "heddle serve" not in line) < 140
    for words in ("recommended", "memory of the rank", "refused", "heddle serve llama-3.1-70b"):
        assert words in out
    assert "rules out" in out
    assert "DCP must divide PCP" in out
    assert "not calibrated" in out


@pytest.mark.parametrize("place", range(3))
def test_an_engine_with_the_printed_flags_has_the_printed_room(
    capsys, tiny_folder: Path, place: int
) -> None:
    """The real engine, on threads: its own words and its accounting."""
    found = document_of(capsys, f"{tiny_folder} {SMALL}")
    wanted = ((1, 1, 1), (2, 1, 2), (2, 2, 4))[place]
    candidate = next(
        each
        for each in found["candidates"]
        if tuple(each["layout"][axis] for axis in ("tp", "pcp", "dcp")) == wanted
    )
    parser = generate.create_parser({}, Output())
    words = shlex.split(candidate["flags"])
    executor = "inline" if candidate["layout"]["world_size"] == 1 else "threads"
    arguments = parser.parse([str(tiny_folder), "x", *words, "--executor", executor])
    config = engine_config(str(tiny_folder), **engine_arguments(arguments))
    with LLM.from_config(config) as llm:
        said = opening_lines(config, ServerConfig(), llm.plan, {})
        tokens, longest = candidate["tokens_total"], candidate["longest_prompt"]
        assert f"KV cache size: {tokens} tokens" in said
        assert f"longest prompt: {longest} tokens" in said
        cache = llm.driver.replicas[0].cache
        assert cache.num_usable_blocks * cache.virtual_block_size == tokens
        assert cache.virtual_block_size == candidate["prefix_unit"]
        assert llm.plan.num_threads <= 4
        answer = llm.generate([[5, 6, 7]])[0]
        assert answer.outputs[0].token_ids


def test_a_configuration_file_is_enough(capsys, tiny_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "shape.json"
    copy.write_bytes((tiny_folder / "config.json").read_bytes())
    by_file, by_folder = (document_of(capsys, f"{name} {SMALL}") for name in (copy, tiny_folder))
    rooms = [
        [each["tokens_total"] for each in found["candidates"]] for found in (by_file, by_folder)
    ]
    assert rooms[0]
    assert sorted(rooms[0]) == sorted(rooms[1])


def test_fixed_degrees_are_kept(capsys) -> None:
    found = document_of(capsys, "qwen3-0.6b --device h100 --devices 4 -tp 2 -dp 1")
    sizes = {(each["layout"]["tp"], each["layout"]["dp"]) for each in found["candidates"]}
    assert sizes == {(2, 1)}


def test_a_chunk_that_is_given_holds_for_all(capsys) -> None:
    words = "qwen3-0.6b --device h100 --devices 2"
    free = {each["flags"] for each in document_of(capsys, words)["candidates"]}
    given = document_of(capsys, f"{words} --max-num-batched-tokens 1024")["candidates"]
    assert any("--max-num-batched-tokens 4096" in flags for flags in free)
    assert given
    assert all("--max-num-batched-tokens 1024" in each["flags"] for each in given)


def test_figures_of_a_sheet_can_be_replaced(capsys, tmp_path: Path) -> None:
    changes = tmp_path / "changes.json"
    changes.write_text('{"memory_bytes": {"value": 4e10}}')
    words = "qwen3-0.6b --device h100 --devices 1"
    whole, half = (
        document_of(capsys, f"{words} {extra}") for extra in ("", f"--device-file {changes}")
    )
    assert half["device"]["memory_bytes"] == 40_000_000_000
    assert whole["candidates"][0]["memory"]["device"] == 80_000_000_000


def test_lengths_come_from_a_trace(capsys, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 2048, "output_length": 64, "hash_ids": [1, 2, 3, 4]}
    trace.write_text("\n".join([json.dumps(row)] * 4))
    found = document_of(capsys, f"qwen3-0.6b --device h100 --trace {trace}")
    assert found["workload"]["prompt_len"] == 2048
    assert found["workload"]["output_len"] == 64
    assert found["trace"]["num_requests"] == 4
    assert found["workload"]["cached_share"] == pytest.approx(3 * 2047 / (4 * 2048))
    cold = document_of(capsys, f"qwen3-0.6b --device h100 --trace {trace} --prefix-hit 0")
    assert cold["workload"]["cached_share"] == 0.0
    warm_ttft, cold_ttft = (each["candidates"][0]["predicted"]["ttft"] for each in (found, cold))
    assert warm_ttft < cold_ttft


def test_requests_that_nobody_can_serve_are_said(capsys) -> None:
    code, out, _ = plan(capsys, "qwen3-0.6b --device h100 --prompt-len 60k")
    assert code == 0
    assert "no layout serves such requests" in out
    assert "requests above the window of 40,960 tokens" in out
    assert "heddle serve" not in out


def test_without_a_layout_that_fits_it_fails(capsys) -> None:
    code, out, err = plan(capsys, "llama-3.1-405b --device rtx-5090 --devices 4 --json")
    assert code == 1
    found = json.loads(out)
    assert found["candidates"] == found["recommended"] == []
    assert found["refused"]
    assert len(err.splitlines()) == 1
    assert f"refused: none of {len(found['refused'])} layouts fits; the lightest, -tp" in err
    assert "a rank needs reserve" in err


def test_degrees_that_no_rule_allows_are_counted(capsys) -> None:
    code, _, err = plan(capsys, "qwen3-0.6b --device h100 --devices 4 -tp 4 -dcp 3")
    assert code == 1
    assert "refused: none of 1 layouts is legal" in err
    code, _, err = plan(capsys, "qwen3-0.6b --device h100 --devices 2 -tp 3")
    assert code == 1
    assert "refused: no layout with these degrees has as many ranks as there are devices" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("no-such-model", "is not found; plan reads demo, a folder"),
        ("deepseek-v33", "(nearest: deepseek-v3)"),
        ("qwen3-8b --device H2000", "device='H2000' is not known"),
        ("qwen3-8b --devices 0", "devices=0 is not legal"),
        ("qwen3-8b --prompt-len 0", "prompt_len=0 is not legal"),
        ("qwen3-8b --output-len 0", "output_len=0 is not legal"),
        ("qwen3-8b --prefix-hit 2", "prefix_hit=2.0 is not legal"),
        ("qwen3-8b --trace /no/such.jsonl", "cannot be read"),
        ("qwen3-8b --max-model-len 10000000", "max_model_len=10000000 is not legal"),
        ("qwen3-8b --kv-cache-dtype int3", "kv_cache_dtype=int3 is not legal"),
        ("qwen3-8b --device H100 --dtype float64", "dtype=float64 is not on the sheet"),
    ],
)
def test_what_the_caller_can_mend_is_exit_2(capsys, words: str, message: str) -> None:
    code, out, err = plan(capsys, words)
    assert (code, out) == (2, "")
    assert message in err


def test_a_broken_configuration_is_exit_2(capsys, tmp_path: Path) -> None:
    broken = tmp_path / "config.json"
    broken.write_text("{")
    code, _, err = plan(capsys, str(broken))
    assert code == 2
    assert "is not JSON" in err


def test_a_model_of_a_trillion_parameters_is_planned_while_one_waits(capsys) -> None:
    began = time.process_time()
    words = "kimi-k2 --device h200 --devices 64 --prompt-len 100k --output-len 1000"
    found = document_of(capsys, f"{words} --concurrency 64")
    seconds = time.process_time() - began
    print(f"planned in {seconds:.1f} s of processor time", file=sys.stderr)
    assert len(found["candidates"]) > 100
    assert seconds < 50


def test_a_deep_file_is_no_config(capsys, tmp_path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    code, _, err = plan(capsys, str(path))
    assert code == 2
    assert "it is not JSON that can be read" in err
