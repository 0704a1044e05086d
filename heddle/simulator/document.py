"""The answer of `heddle simulate` as data: one document for programs and for the page.

    schema       "heddle-simulate/1"
    model        {name, architecture, layers, window}
    device       {name, devices, devices_per_host, dtype, is_measured}
    layout       the keys that all commands print: tp, pcp, dcp, pp, dp, interleave, block_size,
                 exchange, executor, world_size, expert_parallel
    flags        with which an engine is what was simulated
    memory       {kv_tokens_total, longest_prompt, prefix_unit, blocks}; blocks of one replica
    trace        {source, requests, seconds, mean_prompt, mean_output, longest, repeated_share}
    requests     that arrived; finished + rejects
    finished     that got all their tokens
    rejects      that were refused
    reject_reasons   {too_long, queue_full}
    clipped      answers cut down to the room that there was
    preemptions  times that a running request lost its blocks
    hit_rate     of prompt tokens that were started, those found in the prefix cache
    ttft, itl, e2e   {p50, p90, p99, mean, max} seconds; null where nothing was measured
    duration_s   simulated, from the first arrival to the last token
    wall_s       that it took here
    steps        of all replicas
    tok_s        output tokens a simulated second
    tok_s_per_device   the same over the devices that the layout uses
    prompt_tok_s   prompt tokens a simulated second, computed or hit
    goodput      requests a second that kept the targets; null without targets
    targets      {ttft, tpot, kept_share}; kept_share is null without targets
    series       {time_s[], kv_share[], running[], waiting[], tok_s[]}, equally long, at most 400;
                 tok_s of the stretch that ends at time_s
    ranks        {rows[], kv_tokens[], imbalance, kv_imbalance}; by global rank: rows computed in
                 all, pads included; positions it owned of the sequences there when its replica
                 held most, those that left a window among them; largest over mean
    decode_starvation   {share_of_steps, longest_gap_s}; steps that take more than twice what their
                 decode rows alone would, of steps with decode rows; longest wait between tokens
    limited_by   {blocks, seats, prefill_slots, rows, nothing}: share of the time by what most of
                 those that waited at a replica lacked; they add up to 1
    bounds       {ttft, itl, e2e {p50, p90, p99}, tok_s}: each [least, most] over the ranges of the
                 sheet; null where it was not asked for
    sweep        [{layout, flags, devices, ttft, itl, e2e, tok_s, tok_s_per_device, goodput,
                 rejects, preemptions, hit_rate, on_front}], best first, the first is the layout
                 above; on_front: no other is better in tok_s_per_device and in the 99th percentile
                 of itl, or in tok_s_per_device and that of ttft
    notes        [text]: how far this is to be trusted

Times are seconds of the simulated clock. Every number is finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from heddle.config import SchedulerConfig
from heddle.planner.advise import flags_of, interleave_reason
from heddle.planner.document import layout
from heddle.planner.document import notes as planner_notes
from heddle.planner.memory import PlannedEngine
from heddle.planner.settings import Settings
from heddle.planner.trace import TracedRequest, summarise
from heddle.planner.workload import Workload

SCHEMA = "heddle-simulate/1"
_FLAGS = {
    "--max-num-partial-prefills": "max_num_partial_prefills",
    "--long-prefill-token-threshold": "long_prefill_token_threshold",
    "--target-itl": "target_itl_ms",
    "--max-num-queued-reqs": "max_num_queued_reqs",
    "--max-num-queued-tokens": "max_num_queued_tokens",
}
"""Of a scheduler, beside those that a plan prints."""


def describe(
    engine: PlannedEngine,
    requests: Sequence[TracedRequest],
    source: str,
    answer: dict[str, Any],
    *,
    bounds: dict[str, Any] | None = None,
    sweep: Sequence[dict[str, Any]] = (),
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """The whole document.

    Args:
        engine: that was simulated.
        requests: by arrival, at least one.
        source: where they are from, in words.
        answer: of `heddle.simulator.outcome.measure`.
        bounds: of the same figures; None: not asked for.
        sweep: other layouts, this one first.
        notes: what was decided for the caller.
    """
    settings = engine.settings
    model = settings.model
    return {
        "schema": SCHEMA,
        "model": {
            "name": settings.model_name,
            "architecture": model.architecture,
            "layers": model.num_layers,
            "window": engine.room.window,
        },
        "device": {
            "name": settings.sheet.name,
            "devices": settings.num_devices,
            "devices_per_host": settings.sheet.devices_per_host,
            "dtype": settings.dtype,
            "is_measured": settings.sheet.is_measured,
        },
        "layout": layout(engine.parallel, engine.resolved.cache.block_size),
        "flags": serve_flags(engine),
        "memory": {
            "kv_tokens_total": engine.room.tokens_total,
            "longest_prompt": engine.room.longest_prompt,
            "prefix_unit": engine.room.prefix_unit,
            "blocks": engine.resolved.num_blocks,
        },
        "trace": _trace(requests, source),
        **answer,
        "bounds": bounds,
        "sweep": list(sweep),
        "notes": [*notes, *_notes(settings, answer)],
    }


def serve_flags(engine: PlannedEngine) -> str:
    """The flags with which a server is what was simulated.

    Args:
        engine: planned.
    """
    scheduler, usual = engine.resolved.scheduler, SchedulerConfig()
    words = [flags_of(engine)]
    for flag, name in _FLAGS.items():
        value = getattr(scheduler, name)
        if value != getattr(usual, name):
            words.append(f"{flag} {value:g}")
    if not engine.resolved.cache.enable_prefix_caching:
        words.append("--no-enable-prefix-caching")
    return " ".join(words)


def _trace(requests: Sequence[TracedRequest], source: str) -> dict[str, Any]:
    found = summarise(requests)
    return {
        "source": source,
        "requests": found.num_requests,
        "seconds": requests[-1].arrival or 0.0,
        "mean_prompt": found.mean_prompt,
        "mean_output": found.mean_output,
        "longest": found.longest,
        "repeated_share": found.repeated_share,
    }


def _notes(settings: Settings, answer: dict[str, Any]) -> list[str]:
    """How far the figures are to be trusted."""
    load = Workload(prompt_len=1, output_len=1, concurrency=1)
    found = [note for note in planner_notes(settings, load) if note != interleave_reason()]
    found.append(
        "who runs when, which blocks are shared and who is preempted are the engine's own "
        "decisions; only seconds are a model"
    )
    if answer["clipped"]:
        found.append(f"{answer['clipped']} answers were cut down to the room beside their prompts")
    return found
