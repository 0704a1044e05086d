"""Damaged texts of a model folder: settings, tokenizer, adapters. Refused in words, or read."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from heddle.engine.args import engine_config
from heddle.engine.machine import resolve_here
from heddle.engine.tokenizer import load_tokenizer
from heddle.errors import ModelFileError
from heddle.models.adapters.folder import CONFIG_NAME, WEIGHTS_NAME, AdapterFolder
from heddle.models.config_fields import MAX_JSON_BYTES, read_json_object
from heddle.models.config_json import READERS, load_model_config
from heddle.server.sampling import model_defaults
from tests.support.adapters import save_adapter
from tests.support.byte_tokenizer import TEMPLATE, byte_level, save_folder, space_marked
from tests.support.mutations import DEEP, HOSTILE, mutated_bytes, mutated_json, try_mutants
from tests.support.tiny import TINY_NAMES, tiny_config

FEW = 25
MANY = 1000
TIERS = [FEW, pytest.param(MANY, marks=pytest.mark.slow)]
HEADROOM_BYTES = 16 << 20


def text_of(value: Any) -> bytes:
    """JSON as Python writes it: with NaN, lone surrogates and integers without end."""
    try:
        return json.dumps(value).encode()
    except ValueError:  # more digits than Python writes
        return b'{"vocab_size": 1' + b"0" * 5000 + b"}"


def own_seeds(name: str, count: int) -> range:
    """Other seeds for each name, the same in each run."""
    first = zlib.crc32(name.encode())
    return range(first, first + count)


def test_every_family_is_among_the_configurations() -> None:
    named = {name for tiny in TINY_NAMES for name in tiny_config(tiny).architectures or ()}
    assert named == set(READERS)


@pytest.mark.parametrize("count", TIERS)
@pytest.mark.parametrize("name", TINY_NAMES)
def test_mutated_configurations_are_refused_or_planned(
    tmp_path: Path, name: str, count: int
) -> None:
    tiny_config(name).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    good = json.loads(path.read_text())
    config = engine_config(str(tmp_path), tensor_parallel_size=2, kv_cache_memory_bytes=1 << 20)

    def attempt(seed: int) -> None:
        path.write_bytes(text_of(mutated_json(good, seed)))
        load_model_config(tmp_path)
        resolve_here(config)

    found = try_mutants(own_seeds(name, count), attempt)
    assert found.num_refused > 0
    assert found.num_taken > 0
    assert found.peak_bytes < HEADROOM_BYTES


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "rope_parameters"])
def test_no_value_of_a_key_is_more_than_refused(tmp_path: Path, key: str) -> None:
    tiny_config("llama-8-2").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    good = json.loads(path.read_text())

    def attempt(seed: int) -> None:
        path.write_bytes(text_of(good | {key: HOSTILE[seed]}))
        load_model_config(tmp_path)

    assert try_mutants(range(len(HOSTILE)), attempt).num_refused > len(HOSTILE) // 2


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe{}", b"[1]", b"null", b'{"a"', b"[" * 100_000, b'{"a":' * 50_000]
)
def test_a_text_that_is_no_object_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelFileError, match=r"config\.json: (is not valid JSON|holds a)"):
        load_model_config(tmp_path)


def test_a_text_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)  # takes no room on the disk

    def attempt(seed: int) -> None:
        read_json_object(path)

    found = try_mutants([0], attempt, (ModelFileError,))
    assert found.num_refused == 1
    assert found.peak_bytes < 1 << 20


GENERATION = {
    "eos_token_id": [2, 3],
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
}


def test_mutated_generation_settings_are_refused_or_left_out(tmp_path: Path) -> None:
    tiny_config("llama-8-2").save_pretrained(tmp_path)

    def attempt(seed: int) -> None:
        text = text_of(mutated_json(GENERATION, seed))
        damaged = mutated_bytes(text, seed) if seed % 3 == 0 else text
        (tmp_path / "generation_config.json").write_bytes(damaged)
        assert set(model_defaults(str(tmp_path))) <= set(GENERATION)
        load_model_config(tmp_path)

    found = try_mutants(range(200), attempt)
    assert found.num_refused > 20
    assert found.num_taken > 20


def test_a_folder_in_the_place_of_settings_leaves_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").mkdir()
    assert model_defaults(str(tmp_path)) == {}


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [byte_level, space_marked])
@pytest.mark.parametrize(
    "file", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
)
def test_mutated_tokenizers_are_refused_or_work(
    tmp_path: Path, make: Any, file: str, count: int
) -> None:
    names = {"bos_token": "<s>", "eos_token": {"content": "<|end|>"}, "pad_token": None}
    save_folder(tmp_path, make(), chat_template=TEMPLATE, **names)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    good = json.loads((tmp_path / file).read_text())
    text = json.dumps(good).encode()

    def attempt(seed: int) -> None:
        is_broken = seed % 4 == 3
        damaged = mutated_bytes(text, seed) if is_broken else text_of(mutated_json(good, seed))
        (tmp_path / file).write_bytes(damaged)
        tokenizer = load_tokenizer(str(tmp_path))
        assert tokenizer is not None
        ids = tokenizer.encode("the a \u20ac")
        assert isinstance(tokenizer.decode(ids), str)
        assert tokenizer.largest_token_id < 2**32
        assert tokenizer.fewest_tokens("abc" * 99) >= 0

    found = try_mutants(range(count), attempt)
    assert found.num_taken + found.num_refused == count
    assert min(found.num_taken, found.num_refused) > 0


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    module = "model.layers.0.self_attn.q_proj"
    tensors = {f"{module}.lora_A": torch.ones(2, 8), f"{module}.lora_B": torch.ones(8, 2)}
    settings = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"k_proj": 3.0}, "bias": "none"}
    return save_adapter(tmp_path / "adapter", tensors, r=2, lora_alpha=4, **settings)


def use_adapter(folder: Path) -> None:
    with AdapterFolder(folder) as opened:
        opened.check_numbers()
        assert opened.modules
        for module, low_rank in opened.modules.items():
            assert opened.down(module, (0, 1)).shape == (low_rank.rank, 1)


def test_mutated_settings_of_adapters_are_refused_or_read(adapter: Path) -> None:
    path = adapter / CONFIG_NAME
    good = json.loads(path.read_text())

    def attempt(seed: int) -> None:
        path.write_bytes(text_of(mutated_json(good, seed)))
        use_adapter(adapter)

    found = try_mutants(range(300), attempt)
    assert min(found.num_taken, found.num_refused) > 30


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_weights_of_adapters_are_refused_or_read(adapter: Path, count: int) -> None:
    path = adapter / WEIGHTS_NAME
    good = path.read_bytes()

    def attempt(seed: int) -> None:
        path.write_bytes(mutated_bytes(good, seed))
        use_adapter(adapter)

    found = try_mutants(range(count), attempt)
    assert min(found.num_taken, found.num_refused) > count // 100
    assert found.peak_bytes < HEADROOM_BYTES


def test_hostile_values_hold_every_kind() -> None:
    kinds = {type(value) for value in HOSTILE}
    assert kinds == {type(None), bool, int, float, str, list, dict}
    depth, inner = 0, DEEP
    while inner:
        depth, inner = depth + 1, inner[0]
    assert depth == 90
