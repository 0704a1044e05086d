"""A broken checkpoint gives one line that names file and tensor, and exit 2; nothing in it runs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from heddle.cli.main import main
from tests.support.byte_tokenizer import byte_level

NORM = "model.norm.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
SINGLE, FIRST, SECOND = "model.safetensors", "one.safetensors", "two.safetensors"
INDEX = "model.safetensors.index.json"


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, **tensors: torch.Tensor | None) -> None:
    held = load_file(folder / SINGLE) | {key.replace("__", "."): x for key, x in tensors.items()}
    save_file({key: x for key, x in held.items() if x is not None}, folder / SINGLE)


def shard(folder: Path) -> dict[str, str]:
    """Two files and their index; the query matrix is in the second."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    second = {QUERY: tensors.pop(QUERY), NORM: tensors.pop(NORM)}
    save_file(tensors, folder / FIRST)
    save_file(second, folder / SECOND)
    weight_map = dict.fromkeys(tensors, FIRST) | dict.fromkeys(second, SECOND)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def missing_shard(folder: Path) -> None:
    shard(folder)
    (folder / SECOND).unlink()


def index_names_another_file(folder: Path) -> None:
    write_index(folder, shard(folder) | {QUERY: FIRST})


def index_lacks_a_tensor(folder: Path) -> None:
    weight_map = shard(folder)
    del weight_map[NORM]
    write_index(folder, weight_map)


def index_without_map(folder: Path) -> None:
    shard(folder)
    (folder / INDEX).write_text("{}")


def missing_tensor(folder: Path) -> None:
    change_tensors(folder, model__norm__weight=None)


def unknown_tensor(folder: Path) -> None:
    change_tensors(folder, model__extra__weight=torch.ones(3))


def wrong_shape(folder: Path) -> None:
    change_tensors(folder, model__norm__weight=torch.ones(71))


def wrong_dtype(folder: Path) -> None:
    change_tensors(folder, model__norm__weight=torch.ones(72, dtype=torch.int64))


def quantised_in_silence(folder: Path) -> None:
    codes = load_file(folder / SINGLE)[QUERY].to(torch.float8_e4m3fn)
    save_file(load_file(folder / SINGLE) | {QUERY: codes}, folder / SINGLE)


def scales_missing(folder: Path) -> None:
    quantised_in_silence(folder)
    change_config(folder, quantization_config={"quant_method": "fp8"})


def truncated_file(folder: Path) -> None:
    with (folder / SINGLE).open("r+b") as file:
        file.truncate((folder / SINGLE).stat().st_size - 8)


def empty_file(folder: Path) -> None:
    (folder / SINGLE).write_bytes(b"")


def large_tokenizer(folder: Path) -> None:
    byte_level().save(str(folder / "tokenizer.json"))


def larger_vocabulary_than_embedding(folder: Path) -> None:
    change_config(folder, vocab_size=140)


def unknown_architecture(folder: Path) -> None:
    change_config(folder, architectures=["LoomForCausalLM"], model_type="loom")


def custom_code(folder: Path) -> None:
    unknown_architecture(folder)
    change_config(folder, auto_map={"AutoModelForCausalLM": "modeling_x.X"})


def pickles_only(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "pytorch_model.bin")


def unknown_quantisation(folder: Path) -> None:
    change_config(folder, quantization_config={"quant_method": "hqq"})


CASES: dict[Callable[[Path], None], str] = {
    missing_shard: r"two\.safetensors: is missing; the index names it",
    index_names_another_file: rf"one\.safetensors: {QUERY} is missing; .*{INDEX} says",
    index_lacks_a_tensor: rf"two\.safetensors: {NORM} is there; .*{INDEX} does not say so",
    index_without_map: rf"{INDEX}: weight_map is missing",
    missing_tensor: rf"{NORM} of shape \(72,\) is missing",
    unknown_tensor: rf"{SINGLE}: model\.extra\.weight is not part of the configured model",
    wrong_shape: rf"{SINGLE}: {NORM} has shape \(71,\); \(72,\) was expected",
    wrong_dtype: rf"{SINGLE}: {NORM} is stored as I64; known: F64, F32, F16, BF16(?!;)",
    quantised_in_silence: rf"{SINGLE}: {QUERY} is stored as F8_E4M3; .*quantization_config",
    scales_missing: rf"{SINGLE}: {QUERY}_scale_inv is missing; {QUERY} is stored quantised",
    truncated_file: rf"{SINGLE}: is not a whole safetensors file",
    empty_file: rf"{SINGLE}: is not a whole safetensors file",
    large_tokenizer: r"tokenizer has ids up to 2\d\d, and model\.embed_tokens\.weight rows for 131",
    larger_vocabulary_than_embedding: (
        rf"{SINGLE}: model\.embed_tokens\.weight has shape \(131, 72\); \(140, 72\)"
    ),
    unknown_architecture: r"config\.json: architectures=\['LoomForCausalLM'\] is not supported",
    custom_code: r"LoomForCausalLM.*its own code, auto_map, is never run",
    pickles_only: r"no \*\.safetensors file; .*can run code.*safe_serialization",
    unknown_quantisation: r"config\.json: quantization_config\.quant_method='hqq' is not supported",
}


@pytest.mark.parametrize("damage", CASES, ids=lambda damage: damage.__name__)
def test_it_is_one_error_that_names_file_and_tensor(
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    witness = tmp_path / "witness"
    (folder / "modeling_x.py").write_text(f"open({str(witness)!r}, 'w').write('run')\n")
    damage(folder)
    code = main(["generate", str(folder), "abc", "--max-tokens", "1", "--json"])
    captured = capsys.readouterr()
    assert code == 2, captured
    message = json.loads(captured.out)["error"]["message"]
    assert re.search(CASES[damage], message.replace(str(tmp_path), "")), message
    assert captured.err.count("error: ") == 1
    assert "Traceback" not in captured.err
    assert not witness.exists()
