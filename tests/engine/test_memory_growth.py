"""Nothing outlives the decode step that made it: no tensor, no object, no page."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest
import torch

from heddle.config.sampling import SamplingParams
from heddle.engine.inputs import PromptInput
from heddle.engine.llm import LLM
from tests.support.processes import own_bytes
from tests.support.tiny import build_tiny

WARM_STEPS = 256
"""Steps until every cache and deque is full: the latest records are what is kept longest."""
SETTLED_STEPS = 1000
"""Steps until the small blocks that torch and numpy keep for their calls have settled as well."""
PAGES_BYTES = 1 << 20
"""What an allocator may still take, once settled."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = build_tiny(tmp_path_factory.mktemp("growth"), "llama-9-3")
    with LLM(
        str(folder),
        executor="inline",
        kv_cache_memory_bytes=4 << 20,
        attention_backend="torch",
        kernels="torch",
        enable_prefix_caching=False,  # its entries grow until the pool is full
    ) as llm:
        yield llm


def decode(llm: LLM, num_steps: int, answer: int) -> int:
    """Run requests of one length, one after another, to their ends; the steps that it took."""
    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    count = 0
    while count < num_steps:
        llm.driver.add(PromptInput(token_ids=(5, 6, 7)), params)
        while llm.driver.has_work:
            llm.driver.step()
            count += 1
    return count


def live_tensors() -> tuple[int, int]:
    """Tensors that are alive, and bytes of their distinct storages."""
    gc.collect()
    # Other forms (sparse, fake) are of other tests that share the process, and have no storage.
    found = [
        item
        for item in gc.get_objects()
        if type(item) in (torch.Tensor, torch.nn.Parameter) and item.layout is torch.strided
    ]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in found}
    return len(found), sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize(
    ("num_steps", "answer"),
    [(200, 50), pytest.param(2000, 400, marks=pytest.mark.slow)],
    ids=["200 steps", "2000 steps"],
)
def test_nothing_of_a_decode_step_is_kept(llm: LLM, num_steps: int, answer: int) -> None:
    decode(llm, WARM_STEPS, answer)
    tensors = live_tensors()
    count = decode(llm, num_steps, answer)
    # Another thread of this process may let go of some meanwhile.
    assert all(now <= then for now, then in zip(live_tensors(), tensors, strict=True))
    assert count >= num_steps


def held() -> tuple[int, int]:
    """Blocks of the interpreter's allocator, and bytes in memory of the process's own pages: those
    of libraries come and go with the load of the machine."""
    gc.collect()
    return sys.getallocatedblocks(), own_bytes()


@pytest.mark.parametrize(
    ("num_steps", "answer"),
    [(150, 50), pytest.param(2000, 400, marks=pytest.mark.slow)],
    ids=["150 steps", "2000 steps"],
)
def test_memory_does_not_grow_with_decode_steps(llm: LLM, num_steps: int, answer: int) -> None:
    """Half a block a step is less than any object that a step could leave behind.

    What steps leave behind is left by every round; what the kernel or another thread of this
    process does meanwhile is not.
    """
    decode(llm, SETTLED_STEPS, answer)
    grown = []
    for _ in range(3):
        before = held()
        assert decode(llm, num_steps, answer) >= num_steps
        grown.append(tuple(now - then for now, then in zip(held(), before, strict=True)))
        blocks, resident = map(min, zip(*grown, strict=True))
        if blocks < num_steps // 2 and resident < PAGES_BYTES:
            return
    pytest.fail(f"blocks and bytes of each round: {grown}")


def test_one_object_a_step_would_be_seen(llm: LLM) -> None:
    decode(llm, SETTLED_STEPS, 50)
    kept = []
    step = llm.driver.step
    blocks, _ = held()
    params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    llm.driver.add(PromptInput(token_ids=(5, 6, 7)), params)
    while llm.driver.has_work:
        step()
        kept.append(f"step {len(kept)}")
    assert len(kept) >= 150
    assert held()[0] - blocks >= len(kept) // 2
