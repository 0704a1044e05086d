"""The document of a model, as people read it."""

from __future__ import annotations

from typing import Any

from heddle.cli.model_tables import notes, tables
from heddle.cli.output import aligned


def memory_row(ranks: list[int], weights: int) -> dict[str, Any]:
    return {
        "ranks": ranks,
        "process_bytes": 200 << 20,
        "weights_bytes": weights,
        "kv_pool_bytes": 1 << 30,
        "states_bytes": 0,
        "exchange_bytes": 12 << 20,
        "own_exchange_bytes": 6 << 20,
        "activations_bytes": 20 << 20,
        "total_bytes": (232 << 20) + weights + (1 << 30),
    }


DOCUMENT: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "runs": "natively",
    "missing": ["a chat template: none"],
    "choices": ["dtype: float32"],
    "checkpoint": {
        "format": "gguf",
        "quantization": "awq",
        "files": 3,
        "bytes": 5 << 20,
        "tensors": 41,
        "type_bytes": {"Q8_0": 4 << 20, "F32": 1 << 10},
    },
    "window": 8192,
    "longest_prompt": 8191,
    "dtype": "float32",
    "kv_cache_dtype": "int8",
    "layout": {"tp": 3, "pcp": 2, "dcp": 2, "pp": 1, "dp": 1},
    "memory": [memory_row([0, 3], 3 << 20), memory_row([1, 4], 7 << 20), memory_row([2], 3 << 20)],
    "needed_bytes": 5 << 30,
    "free_memory_bytes": 6 << 30,
}


def text_of(document: dict[str, Any]) -> str:
    return "\n".join(map(aligned, tables(document)))


def test_every_fact_is_shown_with_its_unit() -> None:
    lines = [line.split("  ") for line in text_of(DOCUMENT).splitlines()]
    facts = {cells[1].strip(): cells[-1].strip() for cells in lines if len(cells) > 2}
    expected = {
        "architecture": "LlamaForCausalLM",
        "layout": "tp 3 pcp 2 dcp 2",
        "longest prompt": "8191",
        "KV cache in": "int8",
        "needed by all ranks": "5 GiB",
        "free memory here": "6 GiB",
        "on disk": "5 MiB",
        "quantised": "awq",
        "stored as Q8_0": "4 MiB",
        "stored as F32": "1 KiB",
    }
    assert {title: facts[title] for title in expected} == expected


def test_ranks_that_need_the_same_share_a_row() -> None:
    _, memory = tables(DOCUMENT)
    assert memory.rows == [
        ["0 2-3", "200 MiB", "3 MiB", "1 GiB", "0 B", "12 MiB", "20 MiB", "1.229 GiB"],
        ["1 4", "200 MiB", "7 MiB", "1 GiB", "0 B", "12 MiB", "20 MiB", "1.233 GiB"],
    ]
    assert len(memory.columns) == len(memory.rows[0])


def test_what_is_not_known_has_no_row() -> None:
    unknown = dict.fromkeys(("window", "longest_prompt", "dtype", "kv_cache_dtype", "memory"))
    document = DOCUMENT | unknown | {"runs": "not", "checkpoint": None, "needed_bytes": None}
    text = text_of(document)
    assert "None" not in text
    assert "memory of a rank" not in text
    assert "not" in text


def test_notes_say_what_is_missing_first() -> None:
    assert notes(DOCUMENT) == ["missing: a chat template: none", "dtype: float32"]
