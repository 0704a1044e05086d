"""A worker without a model: one collective a step among the ranks of its stage, and faults wherever
a test wants them.

The script travels in `ResolvedConfig.model_path` as JSON, so that it reaches rank processes too:
`{"1:start": "raise", "0:3": "kill"}` makes rank 1 raise while starting and rank 0 die in step 3;
`{"0:3": "signal /a", "1:2": "wait /a"}` ends step 2 of rank 1 only once rank 0 has begun step 3.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from heddle.config import CacheConfig, ModelConfig, ParallelConfig, ResolvedConfig, SchedulerConfig
from heddle.config.model import RopeConfig
from heddle.errors import ModelFileError
from heddle.faults.page import call_words
from heddle.faults.watch import RankWatch, phase_of
from heddle.layout.mesh import Mesh
from heddle.step.batch import GlobalBatch, RankReply, SampledToken, ScheduledRequest
from heddle.step.packed import pack_table
from tests.support.processes import LONG_SECONDS, await_file

FAKE = "tests.support.fake_worker:FakeWorker"


def fake_config(
    script: dict[str, str] | None = None,
    *,
    tp: int = 1,
    pcp: int = 1,
    dcp: int = 1,
    pp: int = 1,
    dp: int = 1,
    **overrides: Any,
) -> ResolvedConfig:
    """A resolved configuration whose model is a script of faults."""
    model = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_query_heads=8,
        num_kv_heads=1,
        head_dim=1,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        tie_word_embeddings=True,
    )
    fields: dict[str, Any] = {
        "model_path": json.dumps(script or {}),
        "model": model,
        "parallel": ParallelConfig(
            tensor_parallel_size=tp,
            prefill_context_parallel_size=pcp,
            decode_context_parallel_size=dcp,
            pipeline_parallel_size=pp,
            data_parallel_size=dp,
        ),
        "cache": CacheConfig(),
        "scheduler": SchedulerConfig(),
        "dtype": "float32",
        "kv_cache_dtype": "float32",
        "executor": "processes",
        "cpu_comm_backend": "shm",
        "backend": "reference",
        "num_blocks": 4,
        "num_threads": 1,
        "context_workspace_tokens": 64,
        "seed": 0,
        "step_timeout_seconds": LONG_SECONDS,
        "startup_timeout_seconds": 2 * LONG_SECONDS,
        "group_timeout_seconds": LONG_SECONDS,
    }
    return ResolvedConfig(**(fields | overrides))


def fake_batch(step: int, *, epoch: int = 0, num_rows: int = 2, context: int = 0) -> GlobalBatch:
    """A step of one request."""
    request = ScheduledRequest(
        request_id=7,
        token_ids=tuple(range(num_rows)),
        num_computed_tokens=context,
        packed_tables=(pack_table([1]),),
        layout_fingerprint=0,
    )
    return GlobalBatch(epoch=epoch, step=step, requests=(request,))


class FakeWorker:
    """Adds up what all ranks of its stage contribute, once per step."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        global_rank: int,
        world: Any,
        on_progress: Callable[[int, int], None] | None = None,
        *,
        watch: RankWatch | None = None,
    ) -> None:
        self._watch = watch or RankWatch()
        self.rank = global_rank
        self._script: dict[str, str] = json.loads(resolved.model_path)
        self._act("before")
        parallel = resolved.parallel
        size = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
        starts = range(0, parallel.world_size, size)
        self._group = world.group("tp", [list(range(start, start + size)) for start in starts])
        self._is_deciding = Mesh.of(parallel).is_last_stage(global_rank) and global_rank % size == 0
        if on_progress is not None:
            on_progress(1, 2)
            on_progress(2, 2)
        self._watch.enter("warmup")
        self._act("start")

    def execute(self, batch: GlobalBatch, digest: int, deadline: float | None) -> RankReply:
        """Fault if told so, then the collective; token id = sum over its ranks of (step + rank)."""
        import torch  # not above: programs that only need the names here must load no torch

        self._watch.begin_step(batch.step, phase_of(batch))
        fault = self._act(str(batch.step))
        self._group.set_deadline(deadline)
        self._watch.begin_call(call_words("all_reduce", "tp", "int64", (1,)))
        total = self._group.all_reduce(torch.tensor([batch.step + self.rank]))
        self._watch.end_call()
        self._act(f"{batch.step}+")
        token = SampledToken(request_id=7, token_id=int(total))
        return RankReply(
            epoch=batch.epoch + (fault == "wrong epoch"),
            step=batch.step + (fault == "wrong step"),
            digest=digest ^ (fault == "wrong digest"),
            coverage=(self.rank,),
            sampled=(token,) if self._is_deciding else (),
        )

    def _act(self, when: str) -> str:
        fault = self._script.get(f"{self.rank}:{when}", "")
        name, _, argument = fault.partition(" ")
        if name == "raise":
            raise ValueError(f"boom on rank {self.rank} at {when}")
        if name == "missing":
            raise ModelFileError("model.safetensors is missing tensor x; expected [2, 2]")
        if name == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            sleep_on_purpose(600.0)  # whoever resumes it to look at its stacks finds it here
        if name == "abort":
            os.write(2, b"last words before abort\n")
            os.abort()
        if name == "exit":
            os._exit(int(argument))
        if name == "sleep":
            sleep_on_purpose(float(argument))
        if name == "spin":
            ctypes.PyDLL(None).sleep(int(argument))  # PyDLL keeps the GIL
        if name == "signal":
            Path(argument).touch()
        if name == "wait":
            await_file(Path(argument))
        if name == "print":
            print(argument, file=sys.stderr, flush=True)
        return fault


def sleep_on_purpose(seconds: float) -> None:
    """A name to look for in dumped stacks."""
    time.sleep(seconds)
