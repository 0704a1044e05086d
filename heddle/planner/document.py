"""The answer of `heddle plan` as data: one document for programs, and what its tables are made of.

Seconds are `ttft`, `tpot`, `gap`, `decode`; rates are tokens a second; memory is in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from heddle.config import ModelConfig, ParallelConfig
from heddle.layout.layout_object import layout_object
from heddle.planner.advise import (
    Advice,
    flags_of,
    interleave_reason,
    largest_chunk,
    recommend,
    rules_out,
    why,
)
from heddle.planner.batches import Rows
from heddle.planner.break_even import Line, break_even_lines
from heddle.planner.cost import CostModel
from heddle.planner.memory import PlannedEngine
from heddle.planner.search import Candidate, Found, degree_flags
from heddle.planner.settings import Settings
from heddle.planner.trace import TracedRequest, repeated_share, summarise
from heddle.planner.traffic import members_of
from heddle.planner.workload import Workload, bands_of, goodput


def describe(
    settings: Settings, load: Workload, found: Found, trace: Sequence[TracedRequest] = ()
) -> dict[str, Any]:
    """The whole document.

    Args:
        settings: of the question.
        load: of the question.
        found: by a search.
        trace: requests that the workload stands for; empty: none.
    """
    candidates = list(found.candidates)
    recommended = []
    for entry in recommend(candidates, load):
        place = next(i for i, each in enumerate(candidates) if each is entry.candidate)
        candidates[place] = _with_goodput(entry.candidate, load)
        refined = replace(entry, candidate=candidates[place])
        recommended.append(_recommended(refined, place, load, trace))
    return {
        "model": _model(settings.model, settings.model_name),
        "device": _device(settings),
        "workload": asdict(load),
        "trace": asdict(summarise(trace)) if trace else None,
        "candidates": [_candidate(each, load) for each in candidates],
        "recommended": recommended,
        "refused": [
            {
                "layout": layout(entry.parallel, settings.cache.block_size),
                "reasons": list(entry.reasons),
                "nearest": list(entry.nearest),
            }
            for entry in found.refused
        ],
        "break_even": [
            line for entry in recommended for line in _lines(candidates[entry["candidate"]], load)
        ],
        "notes": notes(settings, load),
    }


def layout(parallel: ParallelConfig, block_size: int) -> dict[str, Any]:
    """A layout as data: the keys that all commands print, and whether experts are dealt out."""
    found = layout_object(parallel, block_size=block_size, executor="auto")
    return {**found, "expert_parallel": parallel.enable_expert_parallel}


def notes(settings: Settings, load: Workload) -> list[str]:
    """How far the figures are to be trusted."""
    sheet = settings.sheet
    found = [interleave_reason()]
    if sheet.is_measured:
        found.append(f"rates were measured on {sheet.name}; efficiencies have ranges")
    else:
        found.append(
            f"times are not calibrated: the sheet of {sheet.name} holds published peaks and "
            "assumed efficiencies, whose ranges the bands show; heddle doctor --calibrate FILE "
            "measures a machine, and --device FILE takes the result"
        )
    if sheet.kind != "cpu":
        found.append(
            f"ranks of this version compute on processors; figures for {sheet.name} are those of "
            "an engine that reaches the efficiencies of the sheet"
        )
    if sheet.kind == "cpu":
        found.append(
            f"a device of {sheet.name} is a core with {sheet.memory_bytes.value / 1e9:.3g} GB of "
            f"memory: {settings.num_devices} make up to {settings.num_devices} ranks, and fewer "
            "ranks have several threads each; a server without --kv-cache-memory-bytes takes a "
            "quarter of the memory that is free"
        )
    if settings.chunk_per_pcp_rank:
        found.append(
            "layouts are compared with the chunks of their flags, which grow with PCP; "
            "--max-num-batched-tokens gives all of them one"
        )
    if load.cached_share:
        found.append(
            f"{load.cached_share:.0%} of each prompt comes from the prefix cache: fewer rows to "
            "split, and a context that the rest must meet"
        )
    return found


def _model(model: ModelConfig, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "architecture": model.architecture,
        "layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "query_heads": model.num_query_heads,
        "kv_heads": model.num_kv_heads,
        "is_latent": model.is_mla,
        "experts": 0 if model.moe is None else model.moe.num_experts,
        "window": model.max_position_embeddings,
    }


def _device(settings: Settings) -> dict[str, Any]:
    sheet = settings.sheet
    return {
        "name": sheet.name,
        "devices": settings.num_devices,
        "devices_per_host": sheet.devices_per_host,
        "dtype": settings.dtype,
        "memory_bytes": int(sheet.memory_bytes.value),
        "is_measured": sheet.is_measured,
    }


def _candidate(candidate: Candidate, load: Workload) -> dict[str, Any]:
    engine, found = candidate.engine, candidate.prediction
    room = engine.room
    return {
        "layout": layout(engine.parallel, engine.resolved.cache.block_size),
        "devices": candidate.num_devices,
        "memory": memory(engine),
        "predicted": None if found is None else asdict(found),
        "is_finalist": bool(candidate.ends),
        "tokens_total": room.tokens_total,
        "tokens_per_rank": room.tokens_per_rank,
        "prefix_unit": room.prefix_unit,
        "longest_prompt": room.longest_prompt,
        "chunk": engine.chunk,
        "window": room.window,
        "concurrency": engine.concurrency(load.num_tokens) if load.num_tokens <= room.window else 0,
        "why": why(candidate, load),
        "rules_out": rules_out(candidate, load),
        "flags": flags_of(engine),
    }


def memory(engine: PlannedEngine) -> dict[str, Any]:
    """The sheet of the rank that holds most, in bytes."""
    sheet = engine.memory
    return {**asdict(sheet), "total": sheet.total, "headroom": sheet.headroom}


def _with_goodput(candidate: Candidate, load: Workload) -> Candidate:
    """A candidate with its rate of good requests, where there are targets."""
    if candidate.prediction is None or (load.ttft is None and load.tpot is None):
        return candidate
    rate = goodput(candidate.engine, load, CostModel(candidate.engine))
    return replace(candidate, prediction=replace(candidate.prediction, goodput=rate))


def _recommended(
    entry: Advice,
    place: int,
    load: Workload,
    trace: Sequence[TracedRequest],
) -> dict[str, Any]:
    engine, found = entry.candidate.engine, entry.candidate.prediction
    assert found is not None, "it was recommended"
    return {
        "candidate": place,
        "roles": list(entry.roles),
        "layout": layout(engine.parallel, engine.resolved.cache.block_size),
        "predicted": asdict(found),
        "bands": {name: list(b) for name, b in bands_of(entry.candidate.ends).items()},
        "ties": list(entry.ties),
        "largest_chunk": None if load.tpot is None else largest_chunk(engine, load, load.tpot),
        "trace": _traced(engine, trace) if trace else None,
        "traffic": traffic(engine, load),
        "why": why(entry.candidate, load),
        "rules_out": rules_out(entry.candidate, load),
        "flags": flags_of(engine),
    }


def _traced(engine: PlannedEngine, trace: Sequence[TracedRequest]) -> dict[str, Any]:
    """What of a trace never fits, and what its prefixes are worth at this grain."""
    room = engine.room
    never = sum(
        request.prompt_len > room.longest_prompt
        or request.prompt_len + request.output_len > room.window
        for request in trace
    )
    return {
        "never_fit": never,
        "repeated_share": repeated_share(trace, engine.room.prefix_unit),
    }


def traffic(engine: PlannedEngine, load: Workload) -> list[dict[str, Any]]:
    """Calls and bytes of rank 0, in a decode step and in the last chunk of a prompt, by kind of
    group, and the exchanges that were chosen.
    """
    model, topology = CostModel(engine), engine.topology
    count = max(load.concurrency // engine.parallel.data_parallel_size, 1)
    length = min(load.prompt_len, engine.room.longest_prompt)
    rows = min(engine.chunk, length)
    steps = {
        "decode": [Rows(length, 1)] * count,
        "chunk": [Rows(length - rows, rows)],
    }
    found = []
    for name, parts in steps.items():
        cost = model.step(parts)
        groups = [
            {
                "group": kind,
                "ranks": len(members_of(topology.mesh, kind, 0)),
                "crosses_hosts": _crosses(engine, members_of(topology.mesh, kind, 0)),
                "calls": group.calls,
                "bytes": group.received_bytes,
            }
            for kind, group in cost.traffic.groups.items()
        ]
        stage = cost.stages[0]
        parts_seconds = {**asdict(stage), "step": cost.step_seconds}
        found.append(
            {
                "step": name,
                "seconds": cost.seconds,
                "parts": parts_seconds,
                "groups": groups,
                "reasons": list(cost.reasons),
            }
        )
    return found


def _crosses(engine: PlannedEngine, members: Sequence[int]) -> bool:
    per_host = engine.settings.sheet.devices_per_host
    return len({rank // per_host for rank in members}) > 1


def _lines(candidate: Candidate, load: Workload) -> list[dict[str, Any]]:
    engine = candidate.engine
    count = max(load.concurrency // engine.parallel.data_parallel_size, 1)
    return [_line(line) for line in break_even_lines(engine, count)]


def _line(line: Line) -> dict[str, Any]:
    return {
        "what": line.what,
        "layout": degree_flags(line.layout),
        "against": degree_flags(line.against),
        "tokens": line.tokens,
        "band": list(line.band),
    }
