"""With tags no row of somebody else is read, and a wrong table is found before it is read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from heddle import LLM, SamplingParams
from heddle.engine.driver import Driver
from heddle.engine.executors.wrapped import WrappedExecutor
from heddle.engine.inputs import PromptInput
from heddle.errors import PlanMismatch
from heddle.step.batch import GlobalBatch
from heddle.step.packed import pack_table
from heddle.step.plan import plan
from heddle.step.topology import Topology
from tests.support.tiny import build_tiny

LAYOUTS = [
    {},
    {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tags"), "llama-8-2")


def load(folder: Path, **changes: Any) -> LLM:
    settings = {
        "executor": "threads",
        "block_size": 4,
        "num_gpu_blocks_override": 30,
        "kernels": "torch",
        "num_threads": 1,
        "max_num_batched_tokens": 24,
        "debug_kv": True,
        "max_restarts": 0,
        **changes,
    }
    return LLM(str(folder), **settings)


def marked_prompts(count: int, draw: random.Random) -> list[tuple[int, ...]]:
    """Prompts full of a token of their own; some begin with what others begin with."""
    shared = tuple(draw.randrange(3, 100) for _ in range(13))
    prompts = []
    for number in range(count):
        body = tuple(100 + number % 30 for _ in range(draw.randrange(1, 20)))
        prompts.append((*shared[: draw.choice((0, 0, 8, 13))], *body, 3 + number))
    return prompts


def add(driver: Driver, prompt: Sequence[int], count: int) -> str:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=count,
        ignore_eos=True,
        detokenize=False,
        output_kind="final_only",
    )
    return driver.add(PromptInput(token_ids=tuple(prompt)), params)


def isolated(folder: Path, prompts: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """Answers of one rank that serves one prompt at a time and remembers nothing."""
    found = []
    with load(folder, debug_kv=False, enable_prefix_caching=False, executor="inline") as llm:
        for prompt in prompts:
            add(llm.driver, prompt, count)
            outputs = []
            while llm.driver.has_work:
                outputs += llm.driver.step()
            found.append(outputs[-1].outputs[0].token_ids)
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_request_reads_the_rows_of_another(folder: Path, layout: dict[str, int]) -> None:
    """Preemptions, shared prefixes, copies on write and aborts, in a pool that is far too small."""
    draw = random.Random(4)
    prompts = marked_prompts(30, draw)
    golden = isolated(folder, prompts, 6)
    virtual = layout.get("decode_context_parallel_size", 1)
    with load(folder, num_gpu_blocks_override=1 + 26 // virtual, max_num_seqs=8, **layout) as llm:
        driver, waiting = llm.driver, list(enumerate(prompts))
        numbers: dict[str, int] = {}
        found: dict[int, tuple[int, ...]] = {}
        aborted: set[int] = set()
        while waiting or driver.has_work:
            for _ in range(draw.choice((0, 1, 3))):
                if waiting:
                    number, prompt = waiting.pop(0)
                    numbers[add(driver, prompt, 6)] = number
            for output in driver.step():
                if output.finished and output.outputs[0].finish_reason == "length":
                    found[numbers[output.request_id]] = output.outputs[0].token_ids
            open_ = [id_ for id_, number in numbers.items() if number not in {*found, *aborted}]
            if open_ and draw.random() < 0.12:
                victim = draw.choice(open_)
                assert driver.abort(victim) is not None
                aborted.add(numbers[victim])
            driver.audit()
        totals = driver.counters.totals()
    assert totals["preemptions"] > 0
    assert totals["prefix_cache_hits"] > 0
    assert 1 <= len(aborted) <= 12
    assert found.keys() == set(range(30)) - aborted
    assert [found[number] for number in sorted(found)] == [
        golden[number] for number in sorted(found)
    ]


class Meddler(WrappedExecutor):
    """Changes the block table of one request on its way to all ranks."""

    def __init__(self, inner: Any, topology: Topology) -> None:
        super().__init__(inner)
        self.topology = topology
        self.swap: tuple[int, int, int] | None = None
        """(request, place in its table, block that stands there instead)."""

    def submit(self, batches: Any) -> None:
        super().submit({replica: self._changed(batch) for replica, (batch, _) in batches.items()})

    def _changed(self, batch: GlobalBatch) -> tuple[GlobalBatch, int]:
        if self.swap is not None:
            id_, place, block = self.swap
            requests = list(batch.requests)
            for index, request in enumerate(requests):
                if request.request_id == id_:
                    table = request.table(0).tolist()
                    table[place] = block
                    requests[index] = msgspec.structs.replace(
                        request, packed_tables=(pack_table(table),)
                    )
            batch = msgspec.structs.replace(batch, requests=tuple(requests))
        return batch, plan(batch, self.topology).digest


def meddled(folder: Path, **changes: Any) -> tuple[LLM, Meddler]:
    llm = load(folder, **changes)
    driver = llm.driver
    meddler = Meddler(driver.executor, Topology.from_resolved(driver.resolved))
    driver._executor = meddler
    return llm, meddler


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_table_with_a_block_of_another_request_is_found(
    folder: Path, layout: dict[str, int]
) -> None:
    llm, meddler = meddled(folder, **layout)
    with llm:
        driver = llm.driver
        for number in (0, 1):
            add(driver, [110 + number] * 17, 8)
        driver.step()
        first, second = (place.sequence for place in driver._places.values())
        block = second.block_tables[0][0]
        meddler.swap = (first.request_id, 0, block)
        with pytest.raises(PlanMismatch, match="nothing was read") as caught:
            driver.step()
    text = str(caught.value)
    assert caught.value.kind == "kv"
    assert f"position 0 of request {first.request_id} should lie in block {block} (slot " in text
    assert f"there is position 0 of request {second.request_id} with tag 0x" in text
    assert "nothing was read" in text


def test_a_block_that_was_freed_is_found_by_its_tag(folder: Path) -> None:
    llm, meddler = meddled(folder, enable_prefix_caching=False)
    with llm:
        driver = llm.driver
        add(driver, [110] * 9, 12)
        driver.step()
        (kept,) = (place.sequence for place in driver._places.values())
        gone = add(driver, [111] * 9, 12)
        driver.step()
        block = [place.sequence for place in driver._places.values()][1].block_tables[0][1]
        driver.abort(gone)
        driver.step()
        meddler.swap = (kept.request_id, 1, block)
        with pytest.raises(PlanMismatch, match=r"there is nothing, its block was freed 1 times"):
            driver.step()


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_freed_blocks_are_filled_on_every_rank(folder: Path, dtype: str) -> None:
    with load(
        folder,
        enable_prefix_caching=False,
        tensor_parallel_size=2,
        decode_context_parallel_size=2,
        kv_cache_dtype=dtype,
    ) as llm:
        driver = llm.driver
        add(driver, [110] * 9, 30)
        driver.step()
        gone = add(driver, [111] * 9, 12)
        driver.step()
        blocks = [place.sequence for place in driver._places.values()][1].block_tables[0]
        assert len(blocks) == 2
        blocks = list(blocks)
        driver.abort(gone)
        driver.step()
        for worker in driver.executor.workers:  # type: ignore[attr-defined]
            for rows in worker.store.tensors:
                for block in blocks:
                    page = rows[4 * block : 4 * block + 4]
                    if dtype == "auto":
                        assert page.isnan().all()
                    else:
                        assert (page == torch.iinfo(page.dtype).max).all()


def test_without_the_setting_nothing_travels(folder: Path) -> None:
    with load(folder, debug_kv=False) as llm:
        add(llm.driver, [110] * 9, 3)
        batch, _ = llm.driver.replicas[0].begin_step()  # type: ignore[misc]
        assert batch.kv_debug is None
        assert llm.driver.replicas[0].cache.take_freed() == ()
