"""One backend at work on paged sequences of given shapes: what a rank does in the attention of a
step, and nothing else of a model.

A rank is built as an engine builds it, over a checkpoint of zeros with few hidden channels, so
that whatever a backend changes (storage, kernels, threads) is in the measurement. Blocks of a
sequence lie in random order, as they do in a pool that has been in use. Several layers are gone
through, since in a real step no layer finds its rows in a processor cache.

Legend: `B` sequences, `S` tokens of each, `q` new rows of each, `H` query heads, `K` kv heads, `D`
head width, `W` elements of a stored row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from heddle.attention.step_attention import RankAttention
from heddle.attention.storage import SlotWrite
from heddle.bench.zero_weights import WIDTH, zero_weights
from heddle.comm.base import World
from heddle.comm.solo import SoloWorld
from heddle.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from heddle.config.engine import KernelChoice, ResolvedConfig
from heddle.config.model import MLAConfig, RopeConfig
from heddle.errors import UnsupportedError
from heddle.kernels.recording.recording import Recording
from heddle.layout.resolve import resolve
from heddle.models.weights.memory import MemorySource
from heddle.runner.worker import RankWorker
from heddle.step.batch import GlobalBatch, ScheduledRequest
from heddle.step.localize import localize
from heddle.step.packed import pack_table
from heddle.step.plan import plan

IntArray = npt.NDArray[np.int64]

_FREE_BYTES = 1 << 40
"""The pool has as many blocks as the case needs, whatever memory there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Heads of a model; `mla` set: latent attention, absorbed."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    mla: MLAConfig | None = None

    @classmethod
    def of(cls, model: ModelConfig) -> AttentionShape:
        """Those of a model."""
        return cls(
            num_query_heads=model.num_query_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            mla=model.mla,
        )

    @property
    def name(self) -> str:
        """`9/3x64`, or `16x576/512` where rows are latent."""
        if self.mla is None:
            return f"{self.num_query_heads}/{self.num_kv_heads}x{self.head_dim}"
        rank = self.mla.kv_lora_rank
        return f"{self.num_query_heads}x{rank + self.mla.qk_rope_head_dim}/{rank}"

    @property
    def widths(self) -> tuple[int, int]:
        """Key and value elements that a query head meets per stored row."""
        if self.mla is None:
            return self.head_dim, self.head_dim
        return self.mla.kv_lora_rank + self.mla.qk_rope_head_dim, self.mla.kv_lora_rank


def latent_shape(num_heads: int) -> AttentionShape:
    """DeepSeek's widths, 576 and 512.

    Heads are narrow outside the latent space: what lifts queries into it and values out of it is a
    projection of the model, and not to be timed here.
    """
    mla = MLAConfig(
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=8,
        qk_rope_head_dim=64,
        v_head_dim=8,
    )
    return AttentionShape(num_query_heads=num_heads, num_kv_heads=1, head_dim=72, mla=mla)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseSize:
    """What is met: `B` sequences of `S` tokens, the last `q` of each new."""

    context: int
    """S, new rows included."""
    num_rows: int = 1
    """q; 1 is a decode step."""
    num_streams: int = 1
    """B."""
    block_size: int = 16
    num_layers: int = 1
    kv_cache_dtype: str = "auto"
    num_own_blocks: int | None = None
    """Blocks of a sequence at most; later tokens lie over the first, so that a processor's cache
    keeps all of them. None: as many as its tokens need.
    """

    @property
    def pairs(self) -> int:
        """Pairs of a row and a key that it sees, over all sequences."""
        cached = self.context - self.num_rows
        own = self.num_rows * (self.num_rows + 1) // 2
        return self.num_streams * (self.num_rows * cached + own)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Numbers of a case, the same for every contestant."""

    rows: torch.Tensor
    """`[B, S, K, W]`: stored rows."""
    query: torch.Tensor
    """`[B * q, H, Dq]`; latent: as absorbed."""

    @classmethod
    def random(cls, shape: AttentionShape, size: CaseSize) -> Inputs:
        """Standard normal, always the same."""
        generator = torch.Generator().manual_seed(0)
        key, _ = shape.widths
        width = 2 * shape.head_dim if shape.mla is None else key
        rows = torch.randn(
            size.num_streams, size.context, shape.num_kv_heads, width, generator=generator
        )
        num_rows = size.num_streams * size.num_rows
        query = torch.randn(num_rows, shape.num_query_heads, key, generator=generator)
        return cls(rows, query)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Which rank of which layout computes, and how."""

    backend: str = "auto"
    kernels: KernelChoice = "auto"
    dtype: str = "float32"
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    world: World = field(default_factory=SoloWorld)
    """Its way to the others."""

    @property
    def rank(self) -> int:
        """Among all ranks."""
        return self.world.global_rank


@dataclass(slots=True)
class PagedCase:
    """A rank with a filled cache and one step to run."""

    shape: AttentionShape
    size: CaseSize
    inputs: Inputs
    seat: Seat = field(default_factory=Seat)
    row_bytes: int = field(init=False)
    """Of a stored row of one kv head."""
    rows: torch.Tensor = field(init=False)
    """`[M]`: which of the new rows this rank computes; -1 on pads."""
    _attention: RankAttention = field(init=False)
    _num_threads: int = field(init=False)
    _new: torch.Tensor = field(init=False)
    _query: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        resolved = _resolve(self.shape, self.size, self.seat)
        source = MemorySource(zero_weights(resolved.model))
        worker = RankWorker(resolved, self.seat.rank, self.seat.world, source=source)
        self._num_threads = resolved.num_threads
        layout = worker.topology.kv_layout()
        tables = _random_tables(self.size, layout.virtual_block_size)
        self._fill(worker, tables)
        batch = _batch(self.size, tables, worker.topology.fingerprint())
        step = localize(plan(batch, worker.topology), worker.topology, self.seat.rank)
        first = step.request_of_row * self.size.num_rows + self.size.num_rows - self.size.context
        places = np.where(step.request_of_row < 0, -1, first + step.positions)
        self.rows = torch.tensor(places)
        self._attention = RankAttention(step, worker.resources)
        codec = worker.store.codec
        self.row_bytes = codec.width * codec.element.itemsize
        dtype: torch.dtype = getattr(torch, self.seat.dtype)
        new = self.inputs.rows[:, -self.size.num_rows :].flatten(0, 1)  # [B * q, K, W]
        self._new, self._query = (
            numbers[self.rows].to(dtype).contiguous() for numbers in (new, self.inputs.query)
        )

    def run(self) -> torch.Tensor:
        """`[M, H, Dv]` of the last layer, of the rows of this rank."""
        out = torch.empty(0)
        with torch.inference_mode():
            for layer in range(self.size.num_layers):
                out = self._run_layer(layer)
        return out

    def recorded(self) -> Callable[[], torch.Tensor]:
        """`run` as an engine runs the layers of a decode step from its third step on: launched from
        a recording, without their Python. Each call overwrites the result of the one before.

        Raises:
            UnsupportedError: the layers of this backend cannot be repeated.
        """
        inputs = (self._new, self._query)
        recording = Recording(inputs, self._num_threads)
        with torch.inference_mode():
            recording.record(self.run)
        if recording.refusal is not None:
            raise UnsupportedError(f"backend {self.seat.backend}: {recording.refusal}")

        def repeat() -> torch.Tensor:
            with torch.inference_mode():
                return recording.repeat(inputs)

        return repeat

    def sum_rows(self) -> torch.Tensor:
        """Read the pool of every layer once, in the order of memory: what its very pages allow."""
        store = self._attention.resources.store
        return torch.stack([store.layer(n).sum() for n in range(self.size.num_layers)])

    @property
    def kv_bytes(self) -> int:
        """Bytes of the cache that a run reads, on all ranks together."""
        tokens = self.size.num_layers * self.size.num_streams * self.size.context
        return tokens * self.shape.num_kv_heads * self.row_bytes

    @property
    def flops(self) -> int:
        """Of scores and values in a run, on all ranks together."""
        pairs = self.size.num_layers * self.size.pairs
        return 2 * pairs * self.shape.num_query_heads * sum(self.shape.widths)

    def _run_layer(self, layer: int) -> torch.Tensor:
        mla = self.shape.mla
        if mla is None:
            key, value = self._new.chunk(2, dim=-1)  # halves of one, as a rotation leaves them
            return self._attention.gqa(layer, self._query, key, value)
        query = self._query
        eye = torch.eye(mla.kv_lora_rank, dtype=query.dtype).expand(
            self.shape.num_query_heads, -1, -1
        )
        nope = query[..., : mla.qk_nope_head_dim]
        up = eye[:, : mla.qk_nope_head_dim]  # [H, nope, lat]
        down = eye[:, :, : mla.v_head_dim]  # [H, lat, v]
        rope = query[..., mla.kv_lora_rank :]
        return self._attention.mla(
            layer, nope, rope, self._new[:, 0], up, down, self.shape.head_dim**-0.5
        )

    def _fill(self, worker: RankWorker, tables: IntArray) -> None:
        """Write every token that is kept here where its block table says; without this pages would
        be no memory.
        """
        layout, place = (
            worker.topology.kv_layout(),
            worker.topology.group_position(0, self.seat.rank),
        )
        tokens = np.arange(self.size.context)
        slots = np.concatenate([layout.slots(tokens, table, place) for table in tables])
        rows = self.inputs.rows.flatten(0, 1).to(worker.dtype)
        encoded = worker.store.codec.encode(rows)
        for layer in range(self.size.num_layers):
            worker.store.write(layer, SlotWrite.of(slots, worker.store.num_slots), encoded)


def _random_tables(size: CaseSize, virtual_block_size: int) -> IntArray:
    """`[B, blocks]`: all blocks of the pool but the first, in random order."""
    per_stream = -(-size.context // virtual_block_size)
    own = min(per_stream, size.num_own_blocks or per_stream)
    order = np.random.default_rng(0).permutation(size.num_streams * own) + 1
    return order.reshape(size.num_streams, own)[:, np.arange(per_stream) % own]


def _batch(size: CaseSize, tables: IntArray, fingerprint: int) -> GlobalBatch:
    requests = tuple(
        ScheduledRequest(
            request_id=index,
            token_ids=(0,) * size.num_rows,
            num_computed_tokens=size.context - size.num_rows,
            packed_tables=(pack_table(table.tolist()),),
            layout_fingerprint=fingerprint,
        )
        for index, table in enumerate(tables)
    )
    return GlobalBatch(epoch=0, step=0, requests=requests)


def _resolve(shape: AttentionShape, size: CaseSize, seat: Seat) -> ResolvedConfig:
    unit = size.block_size * seat.parallel.decode_context_parallel_size
    is_alone = seat.parallel.world_size == 1
    config = EngineConfig(
        model="shapes",
        dtype=seat.dtype,
        executor="inline" if is_alone else "threads",
        backend=seat.backend,
        kernels=seat.kernels,
        num_threads=torch.get_num_threads(),
        parallel=seat.parallel,
        cache=CacheConfig(
            block_size=size.block_size,
            kv_cache_dtype=size.kv_cache_dtype,
            num_blocks_override=size.num_streams * -(-size.context // unit) + 1,
        ),
    )
    model = _model(shape, size)
    return resolve(
        config, model, free_memory_bytes=_FREE_BYTES, num_cores=1, model_path=config.model
    )


def _model(shape: AttentionShape, size: CaseSize) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM" if shape.mla is None else "DeepseekV2ForCausalLM",
        vocab_size=WIDTH,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_layers=size.num_layers,
        num_query_heads=shape.num_query_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=size.context,
        rms_norm_eps=1e-6,
        rope=RopeConfig(),
        tie_word_embeddings=True,
        mla=shape.mla,
    )
