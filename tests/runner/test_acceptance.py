"""With drafts or without: the same tokens, the same extras, the same failures."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heddle.config.sampling import SamplingParams
from heddle.runner.acceptance import accept
from heddle.runner.sampler import Drawn, RowSampler, sample
from heddle.step.batch import SampleSpec
from heddle.step.draw_params import DrawParams

VOCAB = 6
EOS = 5


def model(tokens: tuple[int, ...]) -> torch.Tensor:
    """`[vocabulary]`: a fixed function of all tokens, so a wrong history shows."""
    seed = [len(tokens), *tokens]
    return torch.from_numpy(2 * np.random.default_rng(seed).normal(size=VOCAB)).float()


def spec(params: SamplingParams, outputs: tuple[int, ...], **fields: Any) -> SampleSpec:
    return SampleSpec(
        params=DrawParams.of(params),
        seed=7,
        choice=1,
        position=len(outputs),
        eos_token_ids=() if params.ignore_eos else (EOS,),
        prompt_token_ids=(1, 2),
        output_token_ids=outputs,
        bad_word_ids=((3, 4), (0,)) if params.bad_words else (),
        **fields,
    )


def one_by_one(params: SamplingParams, count: int) -> list[Drawn]:
    """`count` tokens, each drawn alone from its own row; stops after an end."""
    outputs: tuple[int, ...] = ()
    drawn: list[Drawn] = []
    while len(drawn) < count:
        (found,) = sample(model((1, 2, *outputs))[None], [spec(params, outputs)])
        drawn.append(found)
        if found.token_id is None:
            break
        outputs += (found.token_id,)
        if found.token_id == EOS and not params.ignore_eos and len(outputs) >= params.min_tokens:
            break
    return drawn


def verified(
    params: SamplingParams, drafts: tuple[int, ...], change: Any = lambda rows: rows
) -> list[Drawn]:
    """One step with drafts behind the prompt; two rows of other requests stand before."""
    histories = [drafts[:count] for count in range(len(drafts) + 1)]
    rows = [torch.full((VOCAB,), torch.nan), model((9,))]
    rows += change([model((1, 2, *history)) for history in histories])
    specs = [spec(params, history) for history in histories]
    return accept(RowSampler(torch.stack(rows)), 2, drafts, specs)


KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.5, "top_k": 3, "logprobs": 2},
    {"temperature": 0.7, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.8},
    {"temperature": 1.0, "min_tokens": 3},
    {"temperature": 0.0, "bad_words": ["x"]},
    {"temperature": 1.0, "logit_bias": {EOS: 3.0}},
)


@given(
    st.sampled_from(KINDS),
    st.booleans(),
    st.lists(st.integers(0, VOCAB - 1), max_size=5),
    st.integers(0, 5),
)
@settings(max_examples=200)
def test_what_is_reported_is_what_single_draws_give(
    kind: dict[str, Any], ignore_eos: bool, guesses: list[int], num_right: int
) -> None:
    params = SamplingParams(ignore_eos=ignore_eos, max_tokens=9, **kind)
    plain = one_by_one(params, 6)
    right = tuple(drawn.token_id for drawn in plain[:num_right])
    drafts = (*right, *guesses)[:5]
    count = 1
    while count < len(plain) and count <= len(drafts):
        if drafts[count - 1] != plain[count - 1].token_id:
            break
        count += 1
    assert verified(params, drafts) == plain[:count]


def test_right_drafts_are_kept_whole_and_bring_one_more() -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    plain = one_by_one(params, 5)
    tokens = tuple(drawn.token_id for drawn in plain)
    assert verified(params, tokens[:4]) == plain
    wrong = (*tokens[:2], (tokens[2] + 1) % VOCAB, tokens[3])
    assert verified(params, wrong) == plain[:3]
    assert verified(params, ()) == plain[:1]


@pytest.mark.parametrize("bad", range(4))
def test_bad_numbers_count_only_in_a_row_that_is_needed(bad: int) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    plain = one_by_one(params, 4)
    tokens = tuple(drawn.token_id for drawn in plain)
    wrong = (tokens[0], tokens[1], (tokens[2] + 1) % VOCAB)

    def poison(rows: list[torch.Tensor]) -> list[torch.Tensor]:
        return [row * torch.nan if at == bad else row for at, row in enumerate(rows)]

    found = verified(params, wrong, poison)
    if bad == 3:  # behind the rejected draft
        assert found == plain[:3]
    else:
        assert found[:-1] == plain[:bad]
        assert (found[-1].token_id, found[-1].finite) == (None, False)


@pytest.mark.parametrize("end", [{"eos_token_ids": (4,)}, {"stop": 4}], ids=["eos", "stop id"])
def test_nothing_is_needed_after_an_end(end: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0.0, stop_token_ids=[4] if "stop" in end else [])
    rows = torch.zeros(2, VOCAB)
    rows[0, 4] = 9.0
    rows[1] = torch.nan
    one = SampleSpec(params=DrawParams.of(params), seed=0, choice=0, position=0)
    one = msgspec.structs.replace(one, eos_token_ids=end.get("eos_token_ids", ()))
    two = msgspec.structs.replace(one, position=1)
    assert [drawn.token_id for drawn in accept(RowSampler(rows), 0, (4,), (one, two))] == [4]
    # Below `min_tokens` only a forced token can be one of these, and it ends nothing.
    for min_tokens, expected in ((1, [4]), (2, [4, None])):
        more = dataclasses.replace(params, min_tokens=min_tokens)
        pair = [
            msgspec.structs.replace(each, params=more, forced_token_id=forced)
            for each, forced in ((one, 4), (two, None))
        ]
        found = accept(RowSampler(rows), 0, (4,), pair)
        assert [drawn.token_id for drawn in found] == expected


def test_a_forced_token_decides_about_the_draft() -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    rows = torch.stack([model((1, 2)), model((1, 2, 3))])
    specs = [spec(params, (), forced_token_id=3), spec(params, (3,))]
    (after,) = sample(rows[1:], specs[1:])
    found = accept(RowSampler(rows), 0, (3,), specs)
    assert [drawn.token_id for drawn in found] == [3, after.token_id]
    assert [drawn.token_id for drawn in accept(RowSampler(rows), 0, (2,), specs)] == [3]
