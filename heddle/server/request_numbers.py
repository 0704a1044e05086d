"""What a request tells when it has ended: how long each part of its life took, and its sizes."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from heddle.engine.request_state import RequestState

log = logging.getLogger("heddle.engine")


class Values(Protocol):
    """Where numbers go."""

    def of(self, name: str, replica: int = 0, **labels: object) -> Any:
        """The counter, gauge or histogram of a name and its labels."""
        ...


def add(values: Values, name: str, replica: int, amount: float, **labels: object) -> None:
    """Count up; a sum of nothing makes no row."""
    if amount:
        values.of(name, replica, **labels).inc(amount)


def note_request(values: Values, state: RequestState, replica: int, begin: float | None) -> None:
    """Count a request that has ended.

    Args:
        values: where numbers go.
        state: of the request; finished.
        replica: that served it; 0 where none did.
        begin: when its first step was sent, on the driver's clock; None: it never ran.
    """
    for answer in state.answers:
        values.of("request_success", replica, finished_reason=answer.finish_reason).inc()
    for name, size in sizes_of(state).items():
        values.of(name, replica).observe(size)
    if begin is not None:
        for name, seconds in times_of(state, begin).items():
            values.of(name, replica).observe(max(0.0, seconds))
    if any(answer.finish_reason == "abort" for answer in state.answers):
        where = _where(state, has_run=begin is not None)
        values.of("requests_aborted", replica, where=where).inc()
        log.info(
            "request %s aborted in %s: its client has left; %d prompt tokens, %d tokens given",
            state.request_id,
            where,
            len(state.prompt_token_ids),
            sum(len(answer.token_ids) for answer in state.answers),
        )
    if state.error is not None and not _is_stuck(state):
        values.of("corrupted_requests", replica).inc()
    metrics = state.metrics
    add(values, "spec_decode_num_draft_tokens", replica, metrics.num_drafts)
    add(values, "spec_decode_num_accepted_tokens", replica, metrics.num_accepted_drafts)


def sizes_of(state: RequestState) -> dict[str, int]:
    """Counts of tokens and answers, by the name of the metric."""
    lengths = [len(answer.token_ids) for answer in state.answers]
    num_prompt, params = len(state.prompt_token_ids), state.params
    sizes = {
        "request_prompt_tokens": num_prompt,
        "request_generation_tokens": sum(lengths),
        "request_max_num_generation_tokens": max(lengths),
        "request_params_n": params.n,
        "request_num_preemptions": state.metrics.num_preemptions,
        "request_prefill_kv_computed_tokens": num_prompt - state.sequences[0].num_cached_tokens,
    }
    if params.max_tokens is not None:
        sizes["request_params_max_tokens"] = params.max_tokens
    return sizes


def times_of(state: RequestState, begin: float) -> dict[str, float]:
    """Seconds, by the name of the metric; what never came is left out."""
    metrics = state.metrics
    end, first = metrics.finished_time, metrics.first_token_time
    assert end is not None, "the request goes on"
    times = {
        "e2e_request_latency_seconds": end - metrics.arrival_time,
        "request_queue_time_seconds": begin - metrics.arrival_time,
        "request_inference_time_seconds": end - begin,
    }
    if first is None:
        return times
    times |= {
        "time_to_first_token_seconds": first - metrics.arrival_time,
        "request_prefill_time_seconds": first - begin,
        "request_decode_time_seconds": end - first,
    }
    num_further = max(len(answer.token_ids) for answer in state.answers) - 1
    if num_further > 0:
        times["request_time_per_output_token_seconds"] = (end - first) / num_further
    return times


def _where(state: RequestState, *, has_run: bool) -> str:
    if not has_run:
        return "waiting"
    return "prefill" if state.metrics.first_token_time is None else "decode"


def _is_stuck(state: RequestState) -> bool:
    """It ended because no token could go on with its grammar; its numbers were good."""
    return any(answer.matcher is not None and answer.matcher.is_stuck for answer in state.answers)
