"""What a step's tokens mean for a request: how many drafts were right, and whether it ends."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from heddle.errors import PlanMismatch
from heddle.scheduler.batch import ScheduledBatch, ScheduledPart
from heddle.scheduler.request import FinishReason
from heddle.scheduler.stopping import end_of


def check_tokens(
    batch: ScheduledBatch, tokens: Mapping[int, Sequence[int]], failed: Collection[int]
) -> None:
    """Each open request that samples got a token, and one more for each draft that was right.

    Raises:
        PlanMismatch: too few or too many came back, or one follows a draft that was wrong.
    """
    for part in batch.parts:
        request = part.request
        due = part.samples and request.max_output_tokens > 0 and not request.is_finished
        if due and request.request_id not in failed:
            _check_part(part, tokens.get(request.request_id, ()))


def _check_part(part: ScheduledPart, found: Sequence[int]) -> None:
    name = f"request {part.request.request_id}"
    if not found:
        raise PlanMismatch(f"{name} sampled, but no token came back", "tokens")
    if len(found) > 1 + part.num_drafts:
        raise PlanMismatch(
            f"{name} got {len(found)} tokens from {1 + part.num_drafts} rows", "tokens"
        )
    accepted = tuple(found[:-1])
    if accepted != part.draft_token_ids[: len(accepted)]:
        raise PlanMismatch(
            f"{name} got {list(found)} after the drafts {list(part.draft_token_ids)}; "
            "a token counts only as long as the drafts before it were right",
            "tokens",
        )


def append_tokens(
    part: ScheduledPart, found: Sequence[int]
) -> tuple[int, tuple[FinishReason, int | None] | None]:
    """Give a request its tokens, one by one, until one ends it.

    Args:
        part: of the step.
        found: tokens in order; none where the request asked for none.
    Returns:
        (drafts kept, what ended it or None).
    """
    request = part.request
    if not part.samples:
        return 0, None
    if not request.max_output_tokens:
        return 0, end_of(request)
    for num_accepted, token_id in enumerate(found):
        request.append_output(token_id)
        end = end_of(request)
        if end is not None:
            return num_accepted, end
    return len(found) - 1, None
