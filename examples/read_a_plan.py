"""Read the plan of a step: what every rank agrees on before the first collective.

The batch: a prompt in its second chunk (16 new rows after 24 cached) beside a decoding request.
"""

from __future__ import annotations

from heddle.config import ModelConfig, RopeConfig
from heddle.config.link_costs import LinkCosts
from heddle.layout.heads import HeadLayout
from heddle.layout.mesh import Mesh
from heddle.step.batch import GlobalBatch, ScheduledRequest
from heddle.step.packed import pack_table
from heddle.step.plan import plan
from heddle.step.topology import Topology

MODEL = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=128, hidden_size=64, intermediate_size=128,
    num_layers=2, num_query_heads=8, num_kv_heads=2, head_dim=8, max_position_embeddings=512,
    rms_norm_eps=1e-5, rope=RopeConfig(), tie_word_embeddings=True,
)  # fmt: skip
MESH = Mesh(tp_size=2, pcp_size=2, dcp_size=2)
TOPOLOGY = Topology(
    mesh=MESH,
    heads=HeadLayout(num_query_heads=8, num_kv_heads=2, tp_size=2, slice_size=MESH.slice_size),
    model=MODEL,
    interleave_size=2,
    block_size=4,
    dtype="float32",
    kv_cache_dtype="float32",
    context_workspace_tokens=16,
    costs=LinkCosts(alpha=1e-9, beta=1e9),  # cheap calls, so that so short a prompt is cut
)


def request(number: int, rows: int, cached: int, blocks: tuple[int, ...]) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=number,
        token_ids=tuple(range(rows)),
        num_computed_tokens=cached,
        packed_tables=(pack_table(blocks),),
        layout_fingerprint=TOPOLOGY.fingerprint(),
    )


def main() -> None:
    prompt, decoding = request(0, 16, 24, (1, 2, 3, 4, 5)), request(1, 1, 9, (6, 7))
    step_plan = plan(GlobalBatch(epoch=0, step=7, requests=(prompt, decoding)), TOPOLOGY)
    print("classes:", [row_class.value for row_class in step_plan.classes])
    for reason in step_plan.reasons:
        print("chosen:", reason)
    for row_class, choice in step_plan.groups[0].classes.items():
        for chunk in choice.chunks:
            pieces = [f"request {p.request} [{p.start}, {p.end})" for p in chunk.pieces]
            print(f"{row_class.value} rows meet", ", ".join(pieces), "by", choice.context)
    print(f"digest: {step_plan.digest:#018x}")


if __name__ == "__main__":
    main()
