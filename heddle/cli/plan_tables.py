"""The document of `heddle plan` for people: one screen, reasons in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from heddle.cli.output import Output, Table
from heddle.cli.show_tables import wrapped
from heddle.layout.layout_object import degrees_text

_OTHERS = 6
"""Layouts beside the recommended ones that are shown to people."""
_PARTS = (
    ("weights", "weights"),
    ("of these alike on all tp ranks", "replicated_weights"),
    ("activations of the largest step", "activations"),
    ("exchange", "exchange"),
    ("KV pool", "kv_pool"),
    ("recurrent states", "states"),
    ("reserve", "reserve"),
    ("free", "headroom"),
    ("device", "device"),
)
_LEAST = {"replicated_weights": 10_000_000}
"""Bytes below which a row says nothing."""


def print_plan(document: Mapping[str, Any], output: Output) -> None:
    """Print everything that fits on a screen; `--json` has the rest."""
    output.text(headline(document))
    for table in tables(document):
        output.table(table)
    for line in lines(document):
        output.text(line)


def headline(document: Mapping[str, Any]) -> str:
    """Model, devices and requests in one sentence."""
    model, device, load = document["model"], document["device"], document["workload"]
    kind = "latent" if model["is_latent"] else f"{model['query_heads']}/{model['kv_heads']} heads"
    experts = f", {model['experts']} experts" if model["experts"] else ""
    return (
        f"{model['name']} ({model['layers']} layers, {kind}{experts}) on {device['devices']} x "
        f"{device['name']}, {device['dtype']}; {load['concurrency']} requests at once, "
        f"{load['prompt_len']:,} + {load['output_len']:,} tokens each"
    )


def tables(document: Mapping[str, Any]) -> Iterator[Table]:
    """Recommended layouts, their memory, and the next ones."""
    chosen = document["recommended"]
    if chosen:
        yield Table(
            title="recommended",
            columns=[
                "layout",
                "for",
                "chunk",
                "first token s",
                "gap ms",
                "tokens/s",
                "KV tokens",
                "fit",
            ],
            rows=[_recommended(entry, document) for entry in chosen],
        )
        yield _memory(document)
    others = _others(document)
    if others:
        yield Table(
            title=f"the next of {len(document['candidates'])} that fit",
            columns=["layout", "chunk", "first token s", "gap ms", "tokens/s", "KV tokens", "fit"],
            rows=others,
        )
    if document["refused"]:
        yield _refused(document["refused"])


def lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Reasons, flags, break-evens and notes."""
    name = document["model"]["name"]
    if document["candidates"] and not document["recommended"]:
        yield from wrapped(
            ["no layout serves such requests", *document["candidates"][0]["rules_out"]]
        )
    for entry in document["recommended"]:
        yield f"{_layout(entry['layout'])}, for {', '.join(entry['roles'])}:"
        yield from wrapped([*entry["why"], *entry["ties"]])
        yield from wrapped([f"rules out {what}" for what in entry["rules_out"]])
        yield from wrapped(map(_step, entry["traffic"]))
        yield from wrapped(_targets(entry, document["workload"]))
        yield f"heddle serve {name} {entry['flags']}"
    yield from wrapped(map(_break_even, document["break_even"]))
    yield from wrapped(document["notes"])


def _step(step: Mapping[str, Any]) -> str:
    """What a step takes, and what a rank says in it."""
    what = {"decode": "a decode step", "chunk": "the last chunk of a prompt"}[step["step"]]
    parts = ", ".join(
        f"{name} {seconds / step['seconds']:.0%}"
        for name, seconds in step["parts"].items()
        if seconds >= 0.01 * step["seconds"]
    )
    sent = "; ".join(
        f"{group['group']} {group['calls']} calls, {group['bytes'] / 1e6:,.1f} MB"
        + (" between hosts" if group["crosses_hosts"] else "")
        for group in step["groups"]
    )
    return f"{what}: {_figure(step['seconds'] * 1e3)} ms ({parts}); " + (sent or "nothing is sent")


def _targets(entry: Mapping[str, Any], load: Mapping[str, Any]) -> Iterator[str]:
    """What the targets that were given leave room for."""
    good = entry["predicted"].get("goodput")
    if good is not None:
        yield f"{good:.3g} requests a second keep the targets"
    if load["tpot"] is not None:
        rows = entry["largest_chunk"]
        found = "no chunk keeps" if rows is None else f"chunks of up to {rows:,} rows keep"
        yield f"{found} each step of running requests below {load['tpot']:g} s"


def _layout(layout: Mapping[str, Any]) -> str:
    return degrees_text(layout) + (" ep" if layout["expert_parallel"] else "")


def _recommended(entry: Mapping[str, Any], document: Mapping[str, Any]) -> list[str | int]:
    found, bands = entry["predicted"], entry["bands"]
    candidate = document["candidates"][entry["candidate"]]
    return [
        _layout(entry["layout"]),
        ", ".join(entry["roles"]),
        f"{candidate['chunk']:,}",
        f"{_figure(found['ttft'])} ({_band(bands['ttft'])})",
        f"{_figure(found['tpot'] * 1e3)} ({_band([1e3 * end for end in bands['tpot']])})",
        f"{found['tok_s']:,.0f} ({bands['tok_s'][0]:,.0f} to {bands['tok_s'][1]:,.0f})",
        f"{candidate['tokens_total']:,}",
        f"{candidate['concurrency']:,}",
    ]


def _memory(document: Mapping[str, Any]) -> Table:
    chosen = document["recommended"]
    sheets = [document["candidates"][entry["candidate"]]["memory"] for entry in chosen]
    rows = [
        [name, *(f"{sheet[key] / 1e9:.2f}" for sheet in sheets)]
        for name, key in _PARTS
        if any(sheet[key] >= _LEAST.get(key, 1) for sheet in sheets)
    ]
    rows.append(["KB of KV per token", *(f"{sheet['token'] / 1e3:.1f}" for sheet in sheets)])
    return Table(
        title="memory of the rank that holds most, GB",
        columns=["part", *(_layout(entry["layout"]) for entry in chosen)],
        rows=rows,
    )


def _others(document: Mapping[str, Any]) -> list[list[str]]:
    chosen = {entry["candidate"] for entry in document["recommended"]}
    rest = [
        candidate for index, candidate in enumerate(document["candidates"]) if index not in chosen
    ]
    rest.sort(key=lambda candidate: not candidate["is_finalist"])  # priced as those above
    return [_other(candidate) for candidate in rest[:_OTHERS]]


def _other(candidate: Mapping[str, Any]) -> list[str]:
    found = candidate["predicted"]
    speeds = ["-", "-", "-"]
    if found is not None:
        speeds = [
            _figure(found["ttft"]),
            _figure(found["tpot"] * 1e3),
            f"{found['tok_s']:,.0f}",
        ]
    tokens, fitting = candidate["tokens_total"], candidate["concurrency"]
    chunk = f"{candidate['chunk']:,}"
    return [_layout(candidate["layout"]), chunk, *speeds, f"{tokens:,}", f"{fitting:,}"]


def _refused(refused: Sequence[Mapping[str, Any]]) -> Table:
    """One row for each rule: how many layouts break it, and one of them."""
    counts: Counter[str] = Counter()
    examples: dict[str, Mapping[str, Any]] = {}
    for entry in refused:
        kind = _kind(entry["reasons"][0])
        counts[kind] += 1
        examples.setdefault(kind, entry)
    return Table(
        title="refused",
        columns=["layouts", "why", "for example", "nearest legal"],
        rows=[
            [count, kind, _layout(examples[kind]["layout"]), _first(examples[kind]["nearest"])]
            for kind, count in counts.most_common()
        ],
    )


def _first(nearest: Sequence[str]) -> str:
    return nearest[0] if nearest else "none"


def _kind(reason: str) -> str:
    """What layouts that break one rule have in common: the rule, without their values."""
    if reason.startswith("a rank needs"):
        return "does not fit into the memory of a device"
    rule = reason.partition("; ")[2].partition(";")[0]
    return rule or reason


def _break_even(line: Mapping[str, Any]) -> str:
    what = {
        "pcp": "a prompt's first token comes sooner",
        "dcp": "a decode step is shorter",
    }[line["what"]]
    unit = "tokens" if line["what"] == "pcp" else "resident tokens, context x requests,"
    where = f"{line['layout']} against {line['against']}: {what}"
    low, high = line["band"]
    if low is None:
        return f"{where} at no length within the window"
    if line["tokens"] is None:
        return f"{where} from {low:,.0f} {unit} on, if at all: only at the fast ends of the ranges"
    span = f"{low:,.0f} to {high:,.0f}" if high is not None else f"{low:,.0f} to never"
    return f"{where} from {line['tokens']:,.0f} {unit} on (between {span})"


def _band(ends: Sequence[float]) -> str:
    return f"{_figure(ends[0])} to {_figure(ends[1])}"


def _figure(value: float) -> str:
    """Three digits, and no more than three decimals."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
