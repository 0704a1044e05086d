"""The messages of one step: what the driver sends to every rank, and what ranks reply.

`GlobalBatch` is the only input of a step. It is plain data about the whole batch and holds nothing
local to a rank; each rank derives the same plan from it (`heddle.step.plan`).
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from heddle.kvcache.copies import BlockCopy
from heddle.layout.mesh import GroupKind
from heddle.step.draw_params import DrawParams
from heddle.step.packed import unpack_table
from heddle.step.timeline import StepTimeline
from heddle.step.traffic import CollectiveOp


class SampleSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to draw one token from the last row of a request."""

    params: DrawParams
    seed: int
    """Resolved seed, 0 <= seed < 2**64."""
    choice: int
    """Index among the `n` choices of a request."""
    position: int
    """Output position, from 0."""
    eos_token_ids: tuple[int, ...] = ()
    """Masked until `min_tokens` is reached, with the stop ids; empty when EOS is ignored."""
    prompt_token_ids: tuple[int, ...] = ()
    """Only sent when the repetition penalty needs them."""
    output_token_ids: tuple[int, ...] = ()
    """Only sent when a penalty or bad word needs them."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Bad words as token ids."""
    grammar_mask: bytes = b""
    """Ids that the answer's grammar permits: bit `id % 8` of byte `id // 8`; empty without one."""
    forced_token_id: int | None = None
    """Teacher forcing: report this token instead of the drawn one."""
    return_logits: bool = False
    """Send the raw logits row back (verification, tests)."""


class StateUse(msgspec.Struct, frozen=True, kw_only=True):
    """Where the recurrent state of a sequence is read and written in a step."""

    source: int
    """Slot that holds the state after the cached tokens; 0: none yet, start from zeros."""
    targets: tuple[int, ...]
    """Slots for the state after each of the last `len(targets)` rows; one, or one per row where
    some rows are drafts that may be rejected.
    """


class StateCopy(msgspec.Struct, frozen=True, kw_only=True):
    """A recurrent state is copied to another slot before the step; copies are done in order."""

    source: int
    target: int


class ScheduledRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence's part of a step: `q = len(token_ids)` new rows after `C = num_computed_tokens`
    cached ones.
    """

    request_id: int
    token_ids: tuple[int, ...]
    num_computed_tokens: int
    packed_tables: tuple[bytes, ...]
    """Per cache group: virtual block ids, enough for C + q tokens; 0 where no query of this step or
    later sees the block. As `pack_table` gives them: a long context has thousands of blocks, and
    every rank reads them in every step.
    """
    start_rank: int = 0
    """`u` of the block chain."""
    layout_fingerprint: int
    """Of the sequence's `KVLayout`s; a rank with other layouts refuses the step."""
    samples: tuple[SampleSpec, ...] = ()
    """One for each of the last rows that feed sampling: none for a piece of a prompt, one for its
    end or a decode, `1 + d` where the last `d` tokens are drafts.
    """
    state: StateUse | None = None
    """Set when the model has recurrent layers."""
    prompt_logprob_targets: tuple[int, ...] = ()
    """Next prompt token for each of the first rows; empty unless prompt logprobs were asked for."""
    num_prompt_logprobs: int = 0
    rope_length: int = 0
    """Longest length that the sequence may reach; the same in each of its steps."""
    adapter_slot: int = -1
    """Slot of the adapter that the rows go through; -1: none."""
    embeddings: bytes = b""
    """Rows `[E]` in the compute dtype that replace the first so many tokens of this part."""

    def table(self, group: int) -> npt.NDArray[np.int64]:
        """Block ids of a cache group, in order of position."""
        return unpack_table(self.packed_tables[group])

    @property
    def block_tables(self) -> tuple[tuple[int, ...], ...]:
        """All tables, for people."""
        return tuple(tuple(self.table(group).tolist()) for group in range(len(self.packed_tables)))


class AdapterChange(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter comes to a slot, or leaves it, before the rows of the step are computed."""

    slot: int
    path: str | None
    """Folder of the adapter; None: the slot is emptied."""


class KVDebug(msgspec.Struct, frozen=True, kw_only=True):
    """What ranks that look before they read need to know; see `heddle.step.kv_words`."""

    freed_blocks: tuple[int, ...]
    """Without an owner or content since the step before: filled with NaN first, in this step."""
    words: tuple[bytes, ...]
    """For each request: `[C + q]` words of 64 bits, one for every position."""


class GlobalBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a step depends on."""

    epoch: int
    step: int
    """Of this replica within the epoch, without gaps."""
    layout_id: int = 0
    """Of ranks that the step is for; see `heddle.step.identity`."""
    requests: tuple[ScheduledRequest, ...]
    copies: tuple[BlockCopy, ...] = ()
    wiped_blocks: tuple[int, ...] = ()
    """Blocks to overwrite with zeros first, after a request that produced NaN."""
    state_copies: tuple[StateCopy, ...] = ()
    """Snapshots taken and resumed, in this order."""
    adapter_changes: tuple[AdapterChange, ...] = ()
    """In this order, on all ranks."""
    kv_debug: KVDebug | None = None
    """Only with `debug_kv`."""
    probe: int = -1
    """Id of the request whose numbers are looked at, see `heddle.step.probe`; -1: none."""


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of one position: the chosen (or prompt) token, its rank, and the best
    alternatives.
    """

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class SampledToken(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One token that a request got from a step; several in a row where drafts were accepted."""

    request_id: int
    token_id: int | None
    """None when only prompt logprobs were produced, or the row was not finite."""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finite: bool = True
    """False: NaN or inf in the logits; the request fails, others go on."""
    logits: bytes | None = None
    """Raw row, little-endian in the compute dtype, when asked for."""
    is_barred: bool = False
    """All logits were finite, and the request itself permitted no token; `finite` is False."""


class CollectiveTotal(msgspec.Struct, frozen=True, array_like=True):
    """What the calls of one kind came to on one rank in one step."""

    op: CollectiveOp
    group: GroupKind
    num_calls: int
    num_bytes: int
    """That the rank received; see `heddle.step.traffic.received_bytes`."""
    seconds: float
    """That it spent in them, waits for its peers included."""


class RecordingUse(msgspec.Struct, frozen=True, array_like=True):
    """What one rank's recordings of passes were good for in one step, and what they hold."""

    is_repeated: bool
    """The layers were launched from a recording; False: they were computed anew."""
    num_kept: int
    num_bytes: int
    """Of memory that the recordings compute in."""


class RankReply(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's answer to one step."""

    epoch: int
    step: int
    digest: int
    """Of the plan this rank derived."""
    coverage: tuple[int, ...]
    """Per cache group: sum modulo 2**64 of a mix of (request, position, slot) over the KV rows that
    this rank wrote.
    """
    call_hashes: dict[GroupKind, int] = {}
    """Of the collectives that this rank made in the step, in their order, by kind of group; members
    of a group have equal ones. Groups of one make none.
    """
    num_bad_rows: int = 0
    """Rows with NaN or inf among those that this rank handed to the head."""
    sampled: tuple[SampledToken, ...] = ()
    """Filled by the deciding rank alone."""
    seconds: float = 0.0
    collectives: tuple[CollectiveTotal, ...] = ()
    """By kind of call; kinds that the step did not need are left out."""
    recordings: RecordingUse | None = None
    """None: this rank keeps none."""
    timeline: StepTimeline | None = None
    """None: nobody asked for a trace."""
    probe: tuple[tuple[int, bytes], ...] = ()
    """(layer, `[lanes, Dv]` in the compute dtype): what attention gave for the row that is looked
    at, of the attention layers of this rank's stage; empty on ranks without the row.
    """
