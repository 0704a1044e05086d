"""The document of `heddle simulate` for people: percentiles, what was short, and how sure it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from heddle.cli.output import Cell, Output, Table
from heddle.cli.show_tables import wrapped
from heddle.layout.layout_object import degrees_text

_TIMES = (("first token", "ttft"), ("between tokens", "itl"), ("whole request", "e2e"))
_LIMITS = {
    "blocks": "no KV blocks were free",
    "seats": "as many ran as may (--max-num-seqs)",
    "prefill_slots": "as many prompts were part-way through as may (--max-num-partial-prefills)",
    "rows": "the step was full of other rows",
}
_SWEEP = 12


def print_simulation(document: Mapping[str, Any], output: Output) -> None:
    """Print everything that fits on a screen; `--json` has the rest."""
    output.text(headline(document))
    for table in tables(document):
        output.table(table)
    for line in lines(document):
        output.text(line)


def headline(document: Mapping[str, Any]) -> str:
    """What was asked, in one sentence."""
    trace, device = document["trace"], document["device"]
    return (
        f"{document['model']['name']} on {device['devices']} x {device['name']}, "
        f"{degrees_text(document['layout'])}; {document['requests']:,} requests "
        f"({trace['source']}) in {trace['seconds']:,.1f} s, "
        f"mean {trace['mean_prompt']:,} + {trace['mean_output']:,} "
        "tokens"
    )


def tables(document: Mapping[str, Any]) -> Iterator[Table]:
    """Times, and other layouts."""
    bounds = document["bounds"]
    yield Table(
        title="seconds",
        columns=["", "50%", "90%", "99%", "most", *(["99% within"] if bounds else [])],
        rows=[_times_row(document, name, key) for name, key in _TIMES],
    )
    if document["sweep"]:
        yield Table(
            title="layouts, * on a front of throughput against gap or first token",
            columns=["", "layout", "tokens/s/device", "gap 99% ms", "first 99% s", "refused"],
            rows=[_sweep_row(entry) for entry in document["sweep"][:_SWEEP]],
        )


def lines(document: Mapping[str, Any]) -> Iterator[str]:
    """What happened, what was short, and notes."""
    reasons = document["reject_reasons"]
    yield (
        f"finished {document['finished']:,} in {document['duration_s']:,.1f} s "
        f"({document['wall_s']:.1f} s here); refused {document['rejects']:,} "
        f"({reasons['too_long']:,} too long, {reasons['queue_full']:,} by a full queue); "
        f"preempted {document['preemptions']:,} times; "
        f"{document['hit_rate']:.1%} of prompt tokens hit"
    )
    yield (
        f"{document['tok_s']:,.0f} tokens/s, {document['tok_s_per_device']:,.1f} a device; prompts "
        f"{document['prompt_tok_s']:,.0f} tokens/s; KV at most "
        f"{max(document['series']['kv_share'], default=0.0):.0%} full"
    )
    yield from _kept(document)
    yield from _limits(document)
    starved = document["decode_starvation"]
    yield (
        f"{starved['share_of_steps']:.1%} of steps took over twice what their decodes alone would; "
        f"longest gap {starved['longest_gap_s']:.3f} s; busiest rank over the mean: "
        f"{document['ranks']['imbalance']:.2f} in rows, "
        f"{document['ranks']['kv_imbalance']:.2f} in KV"
    )
    yield f"heddle serve {document['model']['name']} {document['flags']}"
    yield from wrapped(document["notes"])


def _kept(document: Mapping[str, Any]) -> Iterator[str]:
    targets = document["targets"]
    if document["goodput"] is not None:
        wanted = [f"{name} {targets[name]:g} s" for name in ("ttft", "tpot") if targets[name]]
        yield (
            f"{targets['kept_share']:.1%} of requests kept {' and '.join(wanted)}: "
            f"{document['goodput']:.2f} a second"
        )


def _limits(document: Mapping[str, Any]) -> Iterator[str]:
    """What those that waited lacked, the most frequent first."""
    found = document["limited_by"]
    shares = sorted(((found[name], name) for name in _LIMITS), reverse=True)
    said = [f"{_LIMITS[name]} {share:.0%} of the time" for share, name in shares if share >= 0.005]
    yield "waited: " + ("; ".join(said) if said else "hardly anybody, for nothing in particular")


def _times_row(document: Mapping[str, Any], name: str, key: str) -> list[Cell]:
    found, bounds = document[key], document["bounds"]
    row: list[Cell] = [name]
    if found is None:
        return row + ["-"] * (5 if bounds else 4)
    row += [f"{found[part]:.4f}" for part in ("p50", "p90", "p99", "max")]
    if bounds:
        least, most = bounds[key]["p99"]
        row.append(f"{least:.4f} to {most:.4f}")
    return row


def _sweep_row(entry: Mapping[str, Any]) -> list[Cell]:
    return [
        "*" if entry["on_front"] else "",
        degrees_text(entry["layout"]),
        f"{entry['tok_s_per_device']:,.1f}",
        "-" if entry["itl"] is None else f"{entry['itl']['p99'] * 1000:.1f}",
        "-" if entry["ttft"] is None else f"{entry['ttft']['p99']:.2f}",
        entry["rejects"],
    ]
