"""When a sequence ends by its tokens. Stop strings need text and are found by the driver."""

from __future__ import annotations

from heddle.scheduler.request import FinishReason, Request


def end_of(request: Request) -> tuple[FinishReason, int | None] | None:
    """(finish reason, stop id) if the newest token ends the request, else None.

    Stop ids come before the end-of-sequence ids, and those before the length. Neither counts before
    `min_tokens` outputs.
    """
    outputs, params = request.output_token_ids, request.params
    if outputs and len(outputs) >= params.min_tokens:
        if outputs[-1] in params.stop_token_ids:
            return "stop", outputs[-1]
        if outputs[-1] in request.eos_token_ids and not params.ignore_eos:
            return "stop", None
    if len(outputs) >= request.max_output_tokens:
        return "length", None
    return None
