"""A request as the scheduler sees it: tokens, progress, blocks, state.

    token_ids            [ prompt ............. | outputs ... ]
    num_computed_tokens  ------------->|                          KV exists
    num_uncomputed_tokens               <------------------->     rows to run; 1 while decoding

Prompt and outputs are treated alike: a preempted request recomputes both. Only the scheduler
changes a request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from heddle.config.sampling import SamplingParams
from heddle.kvcache.keys import COMMON, CacheScope
from heddle.kvcache.sequence import SequenceBlocks
from heddle.layout.kv import KVLayout
from heddle.scheduler.admission import kv_tokens_needed

FinishReason = Literal["stop", "length", "abort", "error"]
WaitReason = Literal["capacity", "seats", "prefill_slots", "next_step"]


class RequestStatus(Enum):
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptEmbeddings:
    """Embeddings given in place of a prompt's tokens, as the bytes of rows."""

    data: bytes
    """One row after another, in the engine's compute dtype."""
    row_bytes: int

    @property
    def num_rows(self) -> int:
        """Tokens that they stand for."""
        return len(self.data) // self.row_bytes

    def rows(self, start: int, end: int) -> bytes:
        """Those of [start, end) that there are."""
        return self.data[start * self.row_bytes : end * self.row_bytes]


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One sequence: one choice of one prompt. Made by the driver, then owned by the scheduler."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_output_tokens: int
    """The room it was given; see `heddle.scheduler.admission`."""
    kv_layout: KVLayout | None = None
    """That its first cache group was given, constant for life; None without attention layers."""
    priority: int = 0
    """Lower is earlier, where the policy asks for it."""
    seed: int = 0
    choice: int = 0
    eos_token_ids: tuple[int, ...] = ()
    cache_scope: CacheScope = COMMON
    """With whom it may share cached KV."""
    adapter_slot: int = -1
    """Slot of the adapter that its rows go through; -1: none."""
    embeddings: PromptEmbeddings | None = None
    """Stand for its first tokens, whose ids then mean nothing."""
    skip_prefix_hit: bool = False
    """Every prompt row must be computed (prompt logprobs)."""
    teacher: tuple[int, ...] = ()
    """Outputs forced by position; the drawn token counts from there on."""
    return_logits: bool = False
    output_token_ids: list[int] = field(default_factory=list)
    """Not empty at the start if an interrupted request is replayed."""
    draft_token_ids: tuple[int, ...] = ()
    """Guesses of the tokens that follow, for its next step only; see `heddle.scheduler.drafts`."""

    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop id or stop string that ended it."""
    arrival: int = 0
    """Place in the order of `Scheduler.add`."""
    wait_reason: WaitReason = "next_step"
    """What the last step that looked at it, while it waited, had too little of."""
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that the first start took from the prefix cache."""
    no_hit_reason: str = ""
    """Why `num_cached_tokens` is 0, once started."""
    num_preemptions: int = 0
    num_lost_tokens: int = 0
    """Computed tokens given up by preemptions."""
    num_overtakes: int = 0
    """Requests that ever passed it while it waited for blocks."""
    blocks: SequenceBlocks = field(default_factory=SequenceBlocks)
    """What it owns in the cache."""
    token_ids: list[int] = field(init=False)
    """Prompt and outputs in one list, so that a slice costs its own length."""

    def __post_init__(self) -> None:
        self.token_ids = [*self.prompt_token_ids, *self.output_token_ids]

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def rope_length(self) -> int:
        """Longest length that it may reach, constant for life; some rotary tables depend on it."""
        return kv_tokens_needed(self.num_prompt_tokens, self.max_output_tokens)

    @property
    def num_embedded_tokens(self) -> int:
        """First tokens of the prompt that embeddings stand for."""
        return 0 if self.embeddings is None else self.embeddings.num_rows

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and outputs."""
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose KV does not exist yet."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def block_tables(self) -> tuple[list[int], ...]:
        """Per cache group: virtual block ids, in order of position."""
        return self.blocks.block_tables

    @property
    def is_finished(self) -> bool:
        """It will not run again."""
        return self.status is RequestStatus.FINISHED

    def append_output(self, token_id: int) -> None:
        """Add a sampled token; its KV is computed in a later step."""
        self.output_token_ids.append(token_id)
        self.token_ids.append(token_id)
