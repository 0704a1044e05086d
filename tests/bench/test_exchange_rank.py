from __future__ import annotations

from heddle.bench.exchange_rank import ExchangeWorker, exchange_cases, mesh_of
from heddle.comm.threads import ThreadGroup
from heddle.config import EngineConfig, ModelConfig, ParallelConfig
from heddle.config.model import RopeConfig
from heddle.layout.resolve import resolve
from heddle.step.batch import GlobalBatch

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=16,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    tie_word_embeddings=True,
)


def resolved_with(**parallel):
    config = EngineConfig(
        model="m", parallel=ParallelConfig(**parallel), executor="threads", kernels="torch"
    )
    return resolve(
        config,
        MODEL,
        free_memory_bytes=1 << 30,
        num_cores=2,
        model_path="m",
    )


def test_only_groups_of_several_ranks_are_timed():
    found = exchange_cases(resolved_with(prefill_context_parallel_size=2))
    assert {case.kind for case in found} == {"pcp"}
    found = exchange_cases(resolved_with(tensor_parallel_size=2, decode_context_parallel_size=2))
    assert {case.kind for case in found} == {"tp", "dcp"}
    assert mesh_of(resolved_with(tensor_parallel_size=2)).world_size == 2


def test_each_step_times_its_case_on_every_rank():
    resolved = resolved_with(prefill_context_parallel_size=2, decode_context_parallel_size=2)
    num_cases = len(exchange_cases(resolved))

    def rank(world):
        worker = ExchangeWorker(resolved, world.global_rank, world)
        batches = [GlobalBatch(epoch=3, step=step, requests=()) for step in range(num_cases)]
        return [worker.execute(batch, 7, None) for batch in batches]

    for replies in ThreadGroup(2).run(rank):
        assert [reply.step for reply in replies] == list(range(num_cases))
        assert {(reply.epoch, reply.digest) for reply in replies} == {(3, 7)}
        assert all(reply.seconds > 0 for reply in replies)
