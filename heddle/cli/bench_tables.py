"""What `heddle bench` measured, as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from heddle.cli.output import Cell, Table
from heddle.cli.quantities import quantity


def tables(document: Mapping[str, Any]) -> list[Table]:
    """The tables of a document of any subject."""
    return [_TABLES[document["subject"]](document)]


def _speed(document: Mapping[str, Any]) -> Table:
    rows = [
        [
            case["num_streams"],
            case["prompt_len"],
            engine["name"],
            _rounded(engine["ttft_s"], 3),
            _rounded(engine["prefill_tok_s"], 1),
            _rounded(engine["decode_tok_s"], 2),
            _rounded(engine["ratio_prefill"], 2),
            _rounded(engine["ratio_decode"], 2),
            f"{engine['equal_tokens']:.0%}",
        ]
        for case in document["prompts"]
        for engine in case["engines"]
    ]
    columns = ["streams", "prompt", "engine", "first token, s", "prefill tok/s", "decode tok/s"]
    columns += ["ours/its prefill", "ours/its decode", "equal tokens"]
    return Table(title=document["subject"], columns=columns, rows=rows)


def _attention(document: Mapping[str, Any]) -> Table:
    rows = [
        [
            case["shape"],
            case["num_streams"],
            case["context"],
            case["num_rows"],
            row["name"],
            quantity("seconds", row["median_seconds"]),
            quantity("bytes_per_second", row["bytes_per_second"]),
            quantity("flops", row["flops"]),
            _share(row["share_of_read"]),
            _share(row["share_of_gemm"]),
        ]
        for case in document["cases"]
        for row in case["backends"]
    ]
    columns = ["heads", "streams", "context", "new rows", "backend", "all layers", "read", "done"]
    columns += ["of read bandwidth", "of GEMM"]
    return Table(title="attention", columns=columns, rows=rows)


def _exchange(document: Mapping[str, Any]) -> Table:
    columns = ["group", "ranks", "op", "bytes", "seconds", "believed_seconds"]
    rows = [[quantity(name, row[name]) for name in columns] for row in document["collectives"]]
    return Table(title=f"exchange, ranks as {document['executor']}", columns=columns, rows=rows)


def _step(document: Mapping[str, Any]) -> Table:
    rows: list[list[Cell]] = [
        [part["where"], part["part"], quantity("seconds", part["seconds"]), _share(part["share"])]
        for part in document["parts"]
    ]
    title = (
        f"step of {document['num_streams']} decode rows, "
        f"{quantity('seconds', document['step_seconds'])}; driver {document['driver_share']:.1%}"
    )
    return Table(title=title, columns=["where", "part", "time", "share"], rows=rows)


def _rounded(value: float | None, digits: int) -> Cell:
    return "-" if value is None else round(value, digits)


def _share(value: float | None) -> Cell:
    return "-" if value is None else f"{value:.1%}"


_TABLES: Mapping[str, Callable[[Mapping[str, Any]], Table]] = {
    "latency": _speed,
    "throughput": _speed,
    "attention": _attention,
    "exchange": _exchange,
    "step": _step,
}
