"""How many virtual blocks and state slots a pool has: capacity, computed once.

    block bytes on a rank = tensors * block_size * Ks * bytes of a row
    tensors               = most layers that a cache group has in one pipeline stage
    blocks                = pool bytes on a rank // block bytes, at most what the sequences can use
    usable tokens         = of the longest sequence that fits alone, in all, not per rank; block 0
                            is never handed out

A model with recurrent layers keeps a slot of fixed size per running sequence (and one per draft),
and as many snapshots as sequences; they come out of the same bytes, at most half of them.

The rank whose slice stores the most kv heads decides for all, and so does the pipeline stage with
the most layers, since a block id names a page on every rank.

Legend: `Ks` kv heads that a slice stores, `V` virtual block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from heddle.config.cache import CacheConfig
from heddle.config.model import ModelConfig
from heddle.config.parallel import ParallelConfig
from heddle.config.visibility import Visibility
from heddle.errors import ConfigError, counted
from heddle.layout.cache_groups import CacheGroup, create_cache_groups, max_stage_tensors
from heddle.layout.cache_need import UNBOUNDED_TOKENS, blocks_needed, longest_sequence
from heddle.layout.cache_rows import DTYPE_BYTES, row_format
from heddle.layout.cut import cut
from heddle.layout.heads import HeadLayout
from heddle.layout.mesh import Mesh
from heddle.layout.recurrent_heads import RecurrentLayout

_MEMORY_SHARE = 4
"""The pool takes one part in four of the free memory; pages are committed only when written."""
MAX_BLOCKS = 1 << 24
"""More than 200 million tokens at the default block size."""
_STATE_SHARE = 2
"""State slots take one part in two of the pool at most, if any layer stores keys."""


@dataclass(frozen=True, kw_only=True)
class PoolRequest:
    """Everything the size of the pool depends on. The layout is legal."""

    cache: CacheConfig
    parallel: ParallelConfig
    model: ModelConfig
    max_num_seqs: int
    max_model_len: int
    kv_dtype: str
    free_memory_bytes: int
    ranks_on_host: int
    max_num_batched_tokens: int | None = None
    """Most rows of a step, for which windows keep blocks; None: the window of the model."""
    state_slot_bytes: int = 0
    """Recurrent state of one sequence on the rank that holds most, over all layers of its stage."""
    states_per_sequence: int = 1
    """One, and one per draft."""

    @cached_property
    def groups(self) -> tuple[CacheGroup, ...]:
        """Cache groups of the model."""
        dcp_size = self.parallel.decode_context_parallel_size
        return create_cache_groups(self.model, dcp_size, self.cache.block_size)

    @property
    def virtual_block_size(self) -> int:
        """`V` of the first group: positions of one block id."""
        ranks = self.groups[0].world_size if self.groups else 1
        return self.cache.block_size * ranks

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on the rank that stores the most kv heads of the most layers."""
        sizes = self.parallel
        mesh = Mesh(
            tp_size=sizes.tensor_parallel_size,
            pcp_size=sizes.prefill_context_parallel_size,
            dcp_size=sizes.decode_context_parallel_size,
        )
        heads = HeadLayout(
            num_query_heads=self.model.num_query_heads,
            num_kv_heads=self.model.num_kv_heads,
            tp_size=mesh.tp_size,
            slice_size=mesh.slice_size,
        )
        tensors = max_stage_tensors(
            self.groups, self.model.num_layers, sizes.pipeline_parallel_size
        )
        rows = tensors * self.cache.block_size * heads.max_stored_kv_heads
        return rows * row_format(self.model, self.kv_dtype).row_bytes

    @property
    def max_blocks(self) -> int:
        """Blocks that `max_num_seqs` full windows fill in all groups, and block 0."""
        needs = (
            blocks_needed(rule, unit, self.max_model_len, self.max_rows)
            for rule, unit in self.rules
        )
        return self.max_num_seqs * sum(needs) + 1

    @property
    def least_blocks(self) -> int:
        """Blocks with which one token can be served: one of each group, and block 0."""
        return len(self.groups) + 1

    @property
    def max_rows(self) -> int:
        """Most rows of one sequence in a step."""
        return min(self.max_num_batched_tokens or self.max_model_len, self.max_model_len)

    @property
    def rules(self) -> list[tuple[Visibility, int]]:
        """(visible keys, `V`) of each group."""
        size = self.cache.block_size
        return [(group.visibility, group.world_size * size) for group in self.groups]

    @property
    def wanted_state_slots(self) -> int:
        """Slots of `max_num_seqs` sequences, as many snapshots, and slot 0; 0 without recurrent
        layers.
        """
        kinds = (self.model.kind_of(layer) for layer in range(self.model.num_layers))
        if all(kind.mixer != "recurrent" for kind in kinds):
            return 0
        return self.max_num_seqs * (self.states_per_sequence + 1) + 1


def state_slot_bytes(model: ModelConfig, parallel: ParallelConfig, dtype: str) -> int:
    """Recurrent state of one sequence on the rank that holds most; 0 without recurrent layers.

    Args:
        model: its layer kinds.
        parallel: legal degrees.
        dtype: of the model; states are kept in float32 at least.
    """
    kinds = [model.kind_of(layer).mixer == "recurrent" for layer in range(model.num_layers)]
    if model.recurrent is None or not any(kinds):
        return 0
    layout = RecurrentLayout(model.recurrent, parallel.tensor_parallel_size)
    stages = parallel.pipeline_parallel_size
    spans = (cut(model.num_layers, stages, stage) for stage in range(stages))
    num_layers = max(sum(kinds[start:end]) for start, end in spans)
    return num_layers * max(
        layout.slot_bytes(rank, max(DTYPE_BYTES[dtype], 4), DTYPE_BYTES[dtype])
        for rank in range(parallel.tensor_parallel_size)
    )


def pool_state_slots(request: PoolRequest) -> int:
    """Slots for recurrent states, slot 0 included; 0 without recurrent layers.

    Raises:
        ConfigError: not even one sequence fits.
    """
    wanted = request.wanted_state_slots
    if not wanted or not request.state_slot_bytes or request.cache.num_blocks_override is not None:
        return _countable_slots(wanted, request)
    pool_bytes, origin = _pool_bytes(request)
    share = _STATE_SHARE if request.groups else 1
    slots = min(wanted, pool_bytes // share // request.state_slot_bytes)
    least = request.states_per_sequence + 1
    if slots < least:
        # Half of it for states, half for blocks.
        blocks_bytes = request.least_blocks * request.block_bytes
        enough = max(least * request.state_slot_bytes, blocks_bytes) * share
        raise ConfigError(
            f"{origin} make a pool of {pool_bytes:,} bytes on each rank, which is not legal; it "
            f"must hold {least} recurrent states of {request.state_slot_bytes:,} bytes, one of "
            f"them reserved; set kv_cache_memory_bytes to at least {enough}"
        )
    return slots


def _countable_slots(wanted: int, request: PoolRequest) -> int:
    """The slots, where no memory bounds them and accounting must."""
    if wanted > MAX_BLOCKS:
        each = request.states_per_sequence + 1
        raise ConfigError(
            f"max_num_seqs={request.max_num_seqs} is not legal with a given number of blocks and "
            f"{each} recurrent states for each sequence; a pool has at most {MAX_BLOCKS:,} states "
            f"(nearest: {(MAX_BLOCKS - 1) // each})"
        )
    return wanted


def pool_blocks(request: PoolRequest) -> tuple[int, str]:
    """Virtual blocks of the pool, block 0 included, and a sentence that says why.

    Raises:
        ConfigError: not even one usable block.
    """
    if not request.groups:
        slots = pool_state_slots(request)
        return 1, (
            f"KV pool: none, since no layer stores keys; {slots:,} state slots (slot 0 is reserved)"
        )
    least, override = request.least_blocks, request.cache.num_blocks_override
    if override is not None:
        if type(override) is not int:
            raise ConfigError(
                f"num_gpu_blocks_override={override!r} is not legal; it is a whole number"
            )
        if override < least:
            raise ConfigError(
                f"num_gpu_blocks_override={override} is not legal; block 0 is reserved and a token "
                f"takes a block of each cache group, so a pool has at least {least} blocks "
                f"(nearest: {least})"
            )
        _check_most(override, f"num_gpu_blocks_override={override}")
        return override, _sentence(request, override, "num_gpu_blocks_override was given")
    pool_bytes, origin = _pool_bytes(request)
    state_bytes = pool_state_slots(request) * request.state_slot_bytes
    blocks = (pool_bytes - state_bytes) // request.block_bytes
    if blocks < least:
        raise ConfigError(
            f"{origin} make a KV pool of {pool_bytes - state_bytes:,} bytes on each rank, which is "
            f"not legal; it must hold {least} blocks of {request.block_bytes:,} bytes, one "
            f"of them reserved; set kv_cache_memory_bytes to at least "
            f"{least * request.block_bytes + _most_state_bytes(request)}, or lower "
            f"block_size={request.cache.block_size}"
        )
    if blocks > request.max_blocks:
        blocks = request.max_blocks
        origin += f", cut to max_num_seqs={request.max_num_seqs} windows"
    _check_most(blocks, origin)
    return blocks, _sentence(request, blocks, origin)


def _most_state_bytes(request: PoolRequest) -> int:
    """Bytes of all slots that are wanted; a pool with room for them has room for the blocks."""
    return request.wanted_state_slots * request.state_slot_bytes


def _check_most(blocks: int, origin: str) -> None:
    """Accounting keeps a few words for each block, so absurd counts are refused by name."""
    if blocks > MAX_BLOCKS:
        raise ConfigError(
            f"{origin} makes a pool of {blocks:,} blocks, which is not legal; a pool has at most "
            f"{MAX_BLOCKS:,} (nearest: {MAX_BLOCKS})"
        )


def _pool_bytes(request: PoolRequest) -> tuple[int, str]:
    """Bytes of one rank's pool, and where the number comes from."""
    given = request.cache.kv_cache_memory_bytes
    if given is not None:
        return given, f"kv_cache_memory_bytes={given:,}"
    share = request.free_memory_bytes // _MEMORY_SHARE // request.ranks_on_host
    return share, (
        f"a quarter of {request.free_memory_bytes:,} free bytes, shared by "
        f"{counted(request.ranks_on_host, 'rank')} on the host"
    )


def _sentence(request: PoolRequest, blocks: int, origin: str) -> str:
    usable = longest_sequence(request.rules, blocks - 1, request.max_rows)
    tokens = "no limit to" if usable == UNBOUNDED_TOKENS else f"{usable:,}"
    text = (
        f"KV pool: {blocks:,} blocks of {request.virtual_block_size} tokens (block 0 is reserved), "
        f"{tokens} usable tokens in all, {blocks * request.block_bytes:,} bytes on each rank; "
        f"{origin.rstrip(',')}"
    )
    if usable < request.max_model_len:
        text += (
            f"; it is below the window of {request.max_model_len:,}, so longer requests are "
            f"refused; kv_cache_memory_bytes raises it"
        )
    return text
