"""`heddle doctor MODEL`: what headers tell, and every reason against a model at once."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, StableLmConfig

from heddle.cli import doctor
from heddle.cli.main import main
from heddle.cli.model_checkup import examine_model
from heddle.cli.output import Output
from heddle.engine.args import engine_config
from heddle.engine.capacity import Capacity
from heddle.engine.llm import LLM
from heddle.engine.machine import resolve_here
from heddle.errors import PromptTooLong

POOL = 1 << 20


def examine(folder: Path, **arguments: Any) -> dict[str, Any]:
    arguments = {"kv_cache_memory_bytes": POOL} | arguments
    return examine_model(engine_config(str(folder), **arguments), folder)


@pytest.fixture
def copy(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy of a sound model, to be damaged."""
    return shutil.copytree(tiny_folder, tmp_path / "model")


def test_a_sound_model_runs_and_nothing_is_missing(tiny_folder: Path) -> None:
    document = examine(tiny_folder, prefill_context_parallel_size=2)
    assert (document["runs"], document["reasons"], document["nearest"]) == ("natively", [], [])
    assert document["missing"] == []
    assert document["architecture"] == "LlamaForCausalLM"
    assert (document["dtype"], document["kv_cache_dtype"]) == ("float32", "float32")
    assert document["checkpoint"]["format"] == "safetensors"
    assert document["checkpoint"]["quantization"] is None
    tensors = load_file(tiny_folder / "model.safetensors")
    assert document["checkpoint"]["type_bytes"] == {"F32": sum(x.nbytes for x in tensors.values())}
    (row,) = document["memory"]
    assert row["ranks"] == [0, 1]
    parts = ("process", "weights", "kv_pool", "states", "exchange", "activations")
    assert row["total_bytes"] == sum(row[f"{part}_bytes"] for part in parts)
    assert 50 << 20 < row["process_bytes"] <= psutil.Process().memory_info().rss + (50 << 20)
    assert 0.9 * POOL < row["kv_pool_bytes"] <= POOL
    # Each of the two ranks maps the boxes of both.
    assert row["exchange_bytes"] == 2 * row["own_exchange_bytes"] > 0
    assert document["needed_bytes"] == 2 * (row["total_bytes"] - row["own_exchange_bytes"])
    assert document["free_memory_bytes"] > POOL
    json.dumps(document, allow_nan=False)


def test_ranks_that_are_threads_share_one_process(tiny_folder: Path) -> None:
    document = examine(tiny_folder, prefill_context_parallel_size=2, executor="threads")
    (row,) = document["memory"]
    shared = row["process_bytes"]
    assert row["exchange_bytes"] == row["own_exchange_bytes"] == 0
    assert document["needed_bytes"] == 2 * (row["total_bytes"] - shared) + shared


def test_the_longest_prompt_is_the_one_that_the_engine_takes(tiny_folder: Path) -> None:
    for pool in (POOL, 1 << 16):
        arguments = {"kv_cache_memory_bytes": pool, "executor": "inline"}
        resolved = resolve_here(engine_config(str(tiny_folder), **arguments))
        longest = Capacity.of(resolved).longest_prompt
        with LLM(str(tiny_folder), **arguments) as llm:
            llm.driver.replicas[0].scheduler.resolve_room(longest, None)
            with pytest.raises(PromptTooLong):
                llm.driver.replicas[0].scheduler.resolve_room(longest + 1, None)
    assert longest < resolved.scheduler.max_model_len - 1, "the second pool is the bound"


def test_what_a_user_may_miss_is_named(copy: Path) -> None:
    (copy / "tokenizer_config.json").write_text("{}")
    (missing,) = examine(copy)["missing"]
    assert missing.startswith("a chat template")
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer_config.json").unlink()
    (copy / "generation_config.json").unlink()
    document = examine(copy)
    assert [line.split(":")[0] for line in document["missing"]] == [
        "a tokenizer",
        "generation_config.json",
    ]
    assert document["runs"] == "natively"


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_an_unknown_architecture_is_a_reason_and_its_files_are_still_described(copy: Path) -> None:
    change_config(copy, architectures=["LoomForCausalLM"], auto_map={"AutoModel": "loom.Loom"})
    document = examine(copy)
    assert document["runs"] == "not"
    assert document["architecture"] == "LoomForCausalLM"
    assert any("LoomForCausalLM" in reason for reason in document["reasons"])
    assert document["memory"] is None
    assert document["checkpoint"]["tensors"] > 10


def test_a_refused_layout_gives_its_reasons_and_legal_ones(copy: Path) -> None:
    document = examine(copy, decode_context_parallel_size=5, tensor_parallel_size=2)
    assert any("decode_context_parallel_size=5" in reason for reason in document["reasons"])
    assert document["nearest"]
    assert document["architecture"] == "LlamaForCausalLM"


def test_a_setting_and_a_tokenizer_are_refused_at_once(copy: Path) -> None:
    (copy / "tokenizer.json").write_text("{")
    reasons = examine(copy, max_model_len=1 << 30)["reasons"]
    assert any("max_model_len" in reason for reason in reasons)
    assert any("tokenizer.json" in reason for reason in reasons)


@pytest.mark.parametrize("damage", ["missing", "another shape"])
def test_tensors_are_compared_by_header(copy: Path, damage: str) -> None:
    path, name = copy / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(path)
    if damage == "missing":
        del tensors[name]
    else:
        tensors[name] = torch.zeros(3, 4)
    save_file(tensors, path)
    (reason,) = examine(copy)["reasons"]
    assert name in reason
    assert "model.safetensors" in reason or damage == "missing"


def test_a_missing_shard_is_a_reason(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    places = {name: f"model-{len(name) % 2}.safetensors" for name in tensors}
    for place in set(places.values()):
        part = {name: tensors[name] for name in tensors if places[name] == place}
        save_file(part, copy / place)
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert examine(copy)["runs"] == "natively"
    (copy / "model-1.safetensors").unlink()
    document = examine(copy)
    assert any("model-1.safetensors" in reason for reason in document["reasons"])
    assert document["checkpoint"]["missing_files"] == ("model-1.safetensors",)


def test_the_method_of_quantisation_is_named_as_the_file_names_it(copy: Path) -> None:
    change_config(copy, quantization_config={"quant_method": "loom-3bit"})
    document = examine(copy)
    assert document["checkpoint"]["quantization"] == "loom-3bit"
    assert any("loom-3bit" in reason for reason in document["reasons"])


def test_the_method_is_named_from_the_section_that_the_reader_takes(copy: Path) -> None:
    change_config(copy, compression_config={"config_groups": {}})
    document = examine(copy)
    assert document["runs"] == "natively"
    assert document["checkpoint"]["quantization"] == "compressed-tensors"
    change_config(copy, compression_config=None, quantization_config={"bits": 4})
    assert examine(copy)["checkpoint"]["quantization"] == "unknown"


def test_a_model_of_the_transformers_library_is_said_to_be_one(tmp_path: Path) -> None:
    config = StableLmConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    document = examine(tmp_path, kernels="torch")
    assert (document["runs"], document["architecture"]) == (
        "through transformers",
        "StableLmForCausalLM",
    )
    stored = sum(document["checkpoint"]["type_bytes"].values())
    assert stored <= document["memory"][0]["weights_bytes"] < 1.02 * stored


def run(*words: str) -> tuple[int, str, str]:
    out, log = io.StringIO(), io.StringIO()
    output = Output(as_json="--json" in words, stream=out, log=log)
    arguments = doctor.create_parser({}, output).parse(words)
    return doctor.run(arguments, output), out.getvalue(), log.getvalue()


def test_the_command_ends_with_0_for_a_sound_model(tiny_folder: Path) -> None:
    code, out, log = run(str(tiny_folder), "-pcp", "2", "--max-model-len", "64")
    assert (code, log) == (0, "")
    for text in ("LlamaForCausalLM", "natively", "pcp 2", "0-1", "64", "63", "- KV pool: "):
        assert text in out


def test_the_command_ends_with_2_and_every_reason(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"none")
    code, out, log = run(str(copy), "-tp", "2", "-dcp", "5", "--json")
    assert code == 2
    assert log.count("cannot run: ") == 2
    assert "legal:      -tp 2" in log
    assert json.loads(out)["model"]["runs"] == "not"


def test_a_model_that_is_not_here_is_not_fetched(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "someone/some-model"]) == 2
    assert "doctor reads demo, a folder or a .gguf file" in capsys.readouterr().err


def test_flags_without_a_model_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "-pcp", "2"]) == 2
    message = capsys.readouterr().err
    assert "--prefill-context-parallel-size has no effect without a MODEL" in message
