"""An executor without ranks or weights: a toy model whose stored KV is the tokens themselves.

It reads every context through the block tables of the batch, does the copies and the wipes, and so
notices wrong block accounting as a real rank would: the next token depends on all tokens before it.
Each replica has a store of its own; steps wait in a queue until they are collected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch

from heddle.config import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    ResolvedConfig,
    RopeConfig,
    SchedulerConfig,
)
from heddle.config.model import MoEConfig
from heddle.config.speculative import SpeculativeConfig
from heddle.runner.logprobs import prompt_logprobs
from heddle.runner.sampler import sample
from heddle.step.batch import GlobalBatch, RankReply, SampledToken, ScheduledRequest
from heddle.step.coverage import expected_coverage
from heddle.step.topology import Topology

VOCAB_SIZE = 64
EOS = 1


def model_config(vocab_size: int = VOCAB_SIZE) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=64,
        num_layers=1,
        num_query_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        tie_word_embeddings=True,
        eos_token_ids=(EOS,),
    )


def resolved_config(
    *,
    vocab_size: int = VOCAB_SIZE,
    num_blocks: int = 65,
    parallel: ParallelConfig | None = None,
    seed: int = 0,
    moe: MoEConfig | None = None,
    speculative: SpeculativeConfig | None = None,
    max_pinned_tokens: int = 0,
    **scheduler: Any,
) -> ResolvedConfig:
    limits = {"max_num_batched_tokens": 32, "max_model_len": 256, **scheduler}
    return ResolvedConfig(
        model_path="toy",
        model=replace(model_config(vocab_size), moe=moe),
        parallel=parallel or ParallelConfig(),
        cache=CacheConfig(block_size=4, max_pinned_tokens=max_pinned_tokens),
        scheduler=SchedulerConfig(**limits),
        dtype="float32",
        kv_cache_dtype="float32",
        executor="inline",
        backend="torch",
        num_blocks=num_blocks,
        num_threads=1,
        context_workspace_tokens=128,
        seed=seed,
        step_timeout_seconds=10.0,
        startup_timeout_seconds=10.0,
        group_timeout_seconds=5.0,
        speculative=speculative,
    )


def toy_logits(tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    """`[vocabulary]`: a fixed function of the whole sequence, far from ties."""
    return np.random.default_rng([len(tokens), *tokens]).normal(size=vocab_size).astype(np.float32)


def toy_greedy(prompt: Sequence[int], count: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """The tokens that the toy model continues with, without any engine; stops after EOS."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(int(toy_logits(tokens, vocab_size).argmax()))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


class FakeExecutor:
    """Answers every step as ranks would."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        *,
        is_poisoned: Callable[[Sequence[int]], bool] = lambda tokens: False,
        logits: Callable[[Sequence[int]], np.ndarray] | None = None,
    ) -> None:
        """`is_poisoned` says, by the tokens so far, whether the row's logits are NaN."""
        self._topology = Topology.from_resolved(resolved)
        self._unit = self._topology.kv_layout().virtual_block_size
        self._stored: dict[tuple[int, int, int], int] = {}
        self._queues: dict[int, deque[tuple[GlobalBatch, int]]] = {}
        self.rounds: list[dict[int, tuple[GlobalBatch, int]]] = []
        """What each `submit` was given."""
        self.collected: list[tuple[int, int]] = []
        """(replica, step), in order."""
        self.most_under_way = 0
        """Steps of one replica that were under way at once."""
        self.slow: int | None = None
        """Replica that is done only when no other is."""
        self._is_poisoned = is_poisoned
        self._logits = logits or (lambda tokens: toy_logits(tokens, resolved.model.vocab_size))
        self.batches: list[GlobalBatch] = []
        self.failure: BaseException | None = None
        self.is_closed = False

    @property
    def world_size(self) -> int:
        return self._topology.mesh.world_size

    def start(self) -> None:
        return

    def close(self) -> None:
        self.is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ignored: object) -> None:
        self.close()

    def submit(self, batches: Mapping[int, tuple[GlobalBatch, int]]) -> None:
        self.rounds.append(dict(batches))
        for replica, (batch, digest) in batches.items():
            self.batches.append(batch)
            self._queues.setdefault(replica, deque()).append((batch, digest))
            self.most_under_way = max(self.most_under_way, len(self._queues[replica]))

    def first_done(self) -> int:
        """The slow one only if it is the only one."""
        busy = [replica for replica in sorted(self._queues) if self._queues[replica]]
        return min(
            busy, key=lambda replica: (replica == self.slow, self._queues[replica][0][0].step)
        )

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def execute(self, batch: GlobalBatch, digest: int) -> tuple[RankReply, ...]:
        self.submit({0: (batch, digest)})
        return self.collect(0)

    def collect(self, replica: int) -> tuple[RankReply, ...]:
        if self.failure is not None:
            raise self.failure
        batch, digest = self._queues[replica].popleft()
        self.collected.append((replica, batch.step))
        self._edit(batch, replica)
        sampled = [found for r in batch.requests for found in self._run(r, replica)]
        coverage = expected_coverage(batch, self._topology)
        mesh = self._topology.mesh
        first_ranks = {members[0] for members in mesh.groups("dcp")}
        ranks = mesh.ranks_of_replica(replica)
        return tuple(
            RankReply(
                epoch=batch.epoch,
                step=batch.step,
                digest=digest,
                coverage=coverage if rank in first_ranks else (0,),
                sampled=tuple(sampled) if rank == ranks[0] else (),
            )
            for rank in ranks
        )

    def _edit(self, batch: GlobalBatch, replica: int) -> None:
        for block in batch.wiped_blocks:
            for offset in range(self._unit):
                self._stored[replica, block, offset] = 0
        for copy in batch.copies:
            for offset in range(copy.end - copy.start):
                source = self._stored[replica, copy.source_block, offset]
                self._stored[replica, copy.target_block, offset] = source

    def _run(self, request: ScheduledRequest, replica: int) -> list[SampledToken]:
        start = request.num_computed_tokens
        end = start + len(request.token_ids)
        (table,) = request.block_tables
        for position, token in enumerate(request.token_ids, start=start):
            self._stored[replica, table[position // self._unit], position % self._unit] = token
        tokens = [self._stored[replica, table[p // self._unit], p % self._unit] for p in range(end)]
        rows = [self._row(tokens[: start + i + 1]) for i in range(end - start)]
        targets = request.prompt_logprob_targets
        logprobs = prompt_logprobs(
            torch.stack(rows[: len(targets)]) if targets else torch.zeros(0, 1),
            targets,
            request.num_prompt_logprobs,
        )
        if not request.samples:
            if not targets:
                return []
            return [
                SampledToken(request_id=request.request_id, token_id=None, prompt_logprobs=logprobs)
            ]
        found: list[SampledToken] = []
        drafts = [*request.token_ids[len(rows) - len(request.samples) + 1 :], None]
        for row, spec, draft in zip(
            rows[-len(request.samples) :], request.samples, drafts, strict=True
        ):
            (drawn,) = sample(row[None], [spec])
            found.append(
                SampledToken(
                    request_id=request.request_id,
                    token_id=drawn.token_id,
                    logprobs=drawn.logprobs,
                    prompt_logprobs=() if found else logprobs,
                    finite=drawn.finite,
                    logits=drawn.logits,
                    is_barred=drawn.is_barred,
                )
            )
            if drawn.token_id != draft:
                break
        return found

    def _row(self, tokens: Sequence[int]) -> torch.Tensor:
        row = torch.from_numpy(self._logits(tokens))
        return row * float("nan") if self._is_poisoned(tokens) else row
