"""A rank that is damaged on purpose: every single mutation of what it received, of where it stores
and of its numbers is found where it should be.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from heddle.config.faults import fault_rules
from heddle.errors import PlanMismatch
from heddle.faults.watch import create_watch
from heddle.runner.damage import create_damage
from heddle.step.batch import GlobalBatch, SampledToken, SampleSpec, ScheduledRequest
from heddle.step.draw_params import DrawParams
from heddle.step.packed import pack_table
from tests.support.faulted import (
    FIRST_DECODE,
    LAYOUTS,
    NUM_TOKENS,
    PROMPT,
    Heard,
    engine,
    undisturbed,
)
from tests.support.tiny import build_tiny

PLACES = {"prefill": (1, 0), "decode": (FIRST_DECODE + 1, 2)}
"""By phase: step of the fault, and tokens that were drawn before it."""
OTHERS = [(9, 8, 7, 6), tuple(range(40, 51))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("models"), "llama-8-2")


@pytest.fixture(scope="module")
def golden(model: Path) -> list[tuple[int, ...]]:
    return undisturbed(model, [PROMPT, *OTHERS])


def assert_caught(
    model: Path, golden: tuple[int, ...], faults: str, layout: str, told: int
) -> None:
    """Without restarts the step of the fault fails, and nothing of it was told; with them the
    answer is what it would have been.
    """
    options = LAYOUTS[layout] | {"executor": "threads"}
    with engine(model, faults, max_restarts=0, **options) as llm:
        heard = Heard(llm)
        request_id = heard.ask()
        with pytest.raises(PlanMismatch):
            heard.run()
        assert heard.tokens[request_id] == golden[:told]
    with engine(model, faults, max_restarts=1, **options) as llm:
        heard = Heard(llm)
        request_id = heard.ask()
        heard.run()
        assert heard.tokens[request_id] == golden
        assert llm.plan.epoch == 1


@pytest.mark.parametrize("phase", PLACES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("action", ["corrupt_header", "stale_epoch", "flip_slot", "wrong_owner"])
def test_a_damaged_header_or_place_is_caught_in_its_step(
    model: Path, golden: list[tuple[int, ...]], action: str, layout: str, phase: str
) -> None:
    step, told = PLACES[phase]
    assert_caught(model, golden[0], f"{action}(1,{phase},{step})", layout, told)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("action", ["nan(0,decode,0,1,{id})", "inf_logits(0,decode,0,{id})"])
def test_bad_numbers_fail_their_request_alone(
    model: Path, golden: list[tuple[int, ...]], action: str, layout: str
) -> None:
    options = LAYOUTS[layout] | {"executor": "threads", "max_num_batched_tokens": 64}
    with engine(model, action.format(id=1), max_restarts=0, **options) as llm:
        heard = Heard(llm)
        ids = [heard.ask(prompt) for prompt in (PROMPT, *OTHERS)]
        heard.run()
        assert [heard.reasons[i] for i in ids] == ["length", "error", "length"]
        assert heard.tokens[ids[0]] == golden[0]
        assert heard.tokens[ids[2]] == golden[2]
        bad = heard.tokens[ids[1]]
        assert len(bad) < NUM_TOKENS
        assert bad == golden[1][: len(bad)]
        assert llm.plan.epoch == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stale_lse_is_finite_and_wrong(
    model: Path, golden: list[tuple[int, ...]], layout: str
) -> None:
    """All checks of a step pass; only somebody who computes it again sees another number."""

    def last_row(faults: str) -> torch.Tensor:
        with engine(model, faults, max_restarts=0, **LAYOUTS[layout], executor="threads") as llm:
            heard = Heard(llm)
            request_id = heard.ask(return_logits=True, max_tokens=1)
            heard.run()
            assert heard.reasons[request_id] == "length"
            (row,) = heard.logits[request_id]
            return torch.frombuffer(bytearray(row), dtype=torch.float64)

    right, wrong = last_row(""), last_row("stale_lse(1,prefill,2)")
    assert wrong.isfinite().all()
    difference = (right - wrong).abs().max()
    print(f"logits differ by {difference:.3g}")
    assert difference > 1e-3


def test_a_poisonous_token_fails_ranks_until_its_request_is_condemned(
    model: Path, golden: list[tuple[int, ...]]
) -> None:
    poison = 99
    assert all(
        poison not in (*prompt, *answer)
        for prompt, answer in zip((PROMPT, *OTHERS), golden, strict=True)
    )
    faults = f"poison_token(1,prefill,0,{poison},epoch=*);poison_token(1,decode,0,{poison},epoch=*)"
    options = LAYOUTS["TP2 DCP2"] | {"executor": "threads"}
    with engine(model, faults, **options) as llm:
        heard = Heard(llm)
        ids = [heard.ask(prompt) for prompt in (PROMPT, (5, poison, 6), *OTHERS)]
        heard.run()
        told = [heard.tokens[i] for i in ids]
        assert [told[0], *told[2:]] == golden
        assert told[1] == ()
        assert heard.reasons[ids[1]] == "error"


def test_break_matcher_reports_a_token_that_the_grammar_forbids_once() -> None:
    watch = create_watch(fault_rules("break_matcher(0,decode,2)"), 0, 0)
    damage = create_damage(watch, dcp_size=1)
    assert damage is not None
    params = DrawParams(is_greedy=True, temperature=0.0)

    def part(request_id: int, mask: bytes) -> ScheduledRequest:
        sample = SampleSpec(params=params, seed=0, choice=0, position=0, grammar_mask=mask)
        return ScheduledRequest(
            request_id=request_id,
            token_ids=(5,),
            num_computed_tokens=4,
            packed_tables=(pack_table([1]),),
            layout_fingerprint=0,
            samples=(sample,),
        )

    batch = GlobalBatch(epoch=0, step=2, requests=(part(1, b""), part(2, b"\xff\x07")))
    drawn = tuple(SampledToken(request_id=n, token_id=3) for n in (1, 2))
    watch.begin_step(1, "decode")
    assert damage.sampled(batch, drawn) == drawn
    watch.begin_step(2, "decode")
    assert [token.token_id for token in damage.sampled(batch, drawn)] == [3, 11]
    assert damage.sampled(batch, drawn) == drawn
