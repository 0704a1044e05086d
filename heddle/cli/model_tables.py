"""The document of `heddle doctor MODEL` as tables for people."""

from __future__ import annotations

from typing import Any

from heddle.cli.output import Cell, Table
from heddle.cli.quantities import quantity
from heddle.cli.show_tables import runs_text
from heddle.layout.layout_object import degrees_text


def tables(document: dict[str, Any]) -> list[Table]:
    """Facts, and the memory of each kind of rank.

    Args:
        document: of `examine_model`.
    """
    found = [Table(title="model", columns=["what", "value"], rows=_facts(document))]
    if document["memory"] is not None:
        found.append(_memory(document["memory"]))
    return found


def notes(document: dict[str, Any]) -> list[str]:
    """What is missing, and the reason of each choice, as sentences."""
    return [*(f"missing: {line}" for line in document["missing"]), *document["choices"]]


def _facts(document: dict[str, Any]) -> list[list[Cell]]:
    rows: list[list[Cell]] = [
        ["architecture", document["architecture"]],
        ["runs", document["runs"]],
        ["layout", degrees_text(document["layout"])],
    ]
    rows += [
        [title, quantity(key, document[key])]
        for title, key in (
            ("window", "window"),
            ("longest prompt", "longest_prompt"),
            ("computes in", "dtype"),
            ("KV cache in", "kv_cache_dtype"),
            ("needed by all ranks", "needed_bytes"),
            ("free memory here", "free_memory_bytes"),
        )
        if document[key] is not None
    ]
    if document["checkpoint"] is not None:
        rows += _checkpoint(document["checkpoint"])
    return rows


def _checkpoint(stored: dict[str, Any]) -> list[list[Cell]]:
    rows: list[list[Cell]] = [
        ["format", stored["format"]],
        ["files", stored["files"]],
        ["on disk", quantity("bytes", stored["bytes"])],
        ["tensors", stored["tensors"]],
    ]
    if stored["quantization"] is not None:
        rows.append(["quantised", stored["quantization"]])
    rows += [
        [f"stored as {kind}", quantity("bytes", num_bytes)]
        for kind, num_bytes in stored["type_bytes"].items()
    ]
    return rows


def _memory(memory: list[dict[str, Any]]) -> Table:
    """One row for all ranks that need the same."""
    parts = ("process", "weights", "kv_pool", "states", "exchange", "activations", "total")
    keys = [f"{part}_bytes" for part in parts]
    ranks_of: dict[tuple[int, ...], list[int]] = {}
    for row in memory:
        ranks_of.setdefault(tuple(row[key] for key in keys), []).extend(row["ranks"])
    return Table(
        title="memory of a rank",
        columns=["ranks", "process", "weights", "KV pool", "states", "exchange", "step", "in all"],
        rows=[
            [runs_text(sorted(ranks)), *(quantity("bytes", size) for size in sizes)]
            for sizes, ranks in ranks_of.items()
        ],
    )
