"""How many virtual blocks the KV pool has: capacity, computed once.

    block bytes on a rank = layers * block_size * Ks * row width * bytes of an element
    blocks                = pool bytes on a rank // block bytes, at most what the sequences can use
    usable tokens         = (blocks - 1) * V     in all, not per rank; block 0 is never handed out

The rank whose slice stores the most kv heads decides for all, since a block id names a page on
every rank.

Legend: `Ks` kv heads that a slice stores, `V` virtual block.
"""

from __future__ import annotations

from dataclasses import dataclass

from heddle.config.cache import CacheConfig
from heddle.config.model import ModelConfig
from heddle.config.parallel import ParallelConfig
from heddle.errors import ConfigError
from heddle.layout.heads import HeadLayout
from heddle.layout.mesh import Mesh

DTYPE_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
_MEMORY_SHARE = 4
"""The pool takes one part in four of the free memory; pages are committed only when written."""
MAX_BLOCKS = 1 << 24
"""More than 200 million tokens at the default block size."""
_MIN_BLOCKS = 2
"""Block 0 is reserved, and an engine needs one more."""


@dataclass(frozen=True, slots=True, kw_only=True)
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

    @property
    def virtual_block_size(self) -> int:
        """`V`: positions of one block id."""
        return self.cache.block_size * self.parallel.decode_context_parallel_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on the rank that stores the most kv heads, over all layers."""
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
        rows = self.model.num_layers * self.cache.block_size * heads.max_stored_kv_heads
        return rows * self.model.stored_row_width * DTYPE_BYTES[self.kv_dtype]

    @property
    def max_blocks(self) -> int:
        """Blocks that `max_num_seqs` full windows fill, and block 0."""
        window_blocks = -(-self.max_model_len // self.virtual_block_size)
        return self.max_num_seqs * window_blocks + 1


def pool_blocks(request: PoolRequest) -> tuple[int, str]:
    """Virtual blocks of the pool, block 0 included, and a sentence that says why.

    Raises:
        ConfigError: not even one usable block.
    """
    override = request.cache.num_blocks_override
    if override is not None:
        if type(override) is not int:
            raise ConfigError(
                f"num_gpu_blocks_override={override!r} is not legal; it is a whole number"
            )
        if override < _MIN_BLOCKS:
            raise ConfigError(
                f"num_gpu_blocks_override={override} is not legal; block 0 is reserved, so a pool "
                f"has at least {_MIN_BLOCKS} blocks (nearest: {_MIN_BLOCKS})"
            )
        _check_most(override, f"num_gpu_blocks_override={override}")
        return override, _sentence(request, override, "num_gpu_blocks_override was given")
    pool_bytes, origin = _pool_bytes(request)
    blocks = pool_bytes // request.block_bytes
    if blocks < _MIN_BLOCKS:
        raise ConfigError(
            f"{origin} make a KV pool of {pool_bytes:,} bytes on each rank, which is not legal; "
            f"it must hold {_MIN_BLOCKS} blocks of {request.block_bytes:,} bytes, one of them "
            f"reserved; set kv_cache_memory_bytes to at least "
            f"{_MIN_BLOCKS * request.block_bytes}, or lower block_size={request.cache.block_size}"
        )
    if blocks > request.max_blocks:
        blocks = request.max_blocks
        origin += f", cut to max_num_seqs={request.max_num_seqs} windows"
    _check_most(blocks, origin)
    return blocks, _sentence(request, blocks, origin)


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
        f"{request.ranks_on_host} ranks on the host,"
    )


def _sentence(request: PoolRequest, blocks: int, origin: str) -> str:
    usable = (blocks - 1) * request.virtual_block_size
    text = (
        f"KV pool: {blocks:,} blocks of {request.virtual_block_size} tokens (block 0 is reserved), "
        f"{usable:,} usable tokens in all, {blocks * request.block_bytes:,} bytes on each rank; "
        f"{origin.rstrip(',')}"
    )
    if usable < request.max_model_len:
        text += (
            f"; it is below the window of {request.max_model_len:,}, so longer requests are "
            f"refused; kv_cache_memory_bytes raises it"
        )
    return text
