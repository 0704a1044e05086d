from __future__ import annotations

import pytest
import torch

from heddle.config.sampling import SamplingParams
from heddle.runner.logit_rules import apply_rules, has_rules
from heddle.step.batch import SampleSpec
from heddle.step.draw_params import DrawParams

INF = float("inf")


def spec(position: int = 0, **fields: object) -> SampleSpec:
    names = (
        "eos_token_ids",
        "prompt_token_ids",
        "output_token_ids",
        "bad_word_ids",
        "grammar_mask",
    )
    own = {name: fields.pop(name) for name in names if name in fields}
    params = SamplingParams(**fields)  # type: ignore[arg-type]
    return SampleSpec(params=DrawParams.of(params), seed=0, choice=0, position=position, **own)  # type: ignore[arg-type]


def applied(row: list[float], given: SampleSpec) -> list[float]:
    tensor = torch.tensor(row, dtype=torch.float64)
    apply_rules(tensor, given)
    return tensor.tolist()


CASES = [
    ("nothing", spec(), [1.0, -2.0, 3.0, 4.0]),
    ("allowed", spec(allowed_token_ids=[1, 3]), [-INF, -2.0, -INF, 4.0]),
    ("bad word of one", spec(bad_word_ids=((2,),)), [1.0, -2.0, -INF, 4.0]),
    (
        "bad word completed",
        spec(bad_word_ids=((1, 2, 3),), output_token_ids=(0, 1, 2)),
        [1.0, -2.0, 3.0, -INF],
    ),
    (
        "bad word begun only",
        spec(bad_word_ids=((1, 2, 3),), output_token_ids=(1,)),
        [1.0, -2.0, 3.0, 4.0],
    ),
    (
        "bad word with another middle",
        spec(bad_word_ids=((1, 2, 3),), output_token_ids=(1, 0)),
        [1.0, -2.0, 3.0, 4.0],
    ),
    (
        "min tokens not reached",
        spec(position=1, min_tokens=2, eos_token_ids=(0,), stop_token_ids=[3]),
        [-INF, -2.0, 3.0, -INF],
    ),
    (
        "min tokens reached",
        spec(position=2, min_tokens=2, eos_token_ids=(0,), stop_token_ids=[3]),
        [1.0, -2.0, 3.0, 4.0],
    ),
    ("grammar", spec(grammar_mask=bytes([0b0110, 0, 0, 0])), [-INF, -2.0, 3.0, -INF]),
    (
        "grammar after a bias",
        spec(grammar_mask=bytes([0b0101, 0, 0, 0]), logit_bias={0: 1, 1: 50}),
        [2.0, -INF, 3.0, -INF],
    ),
    (
        "grammar before a penalty",
        spec(
            grammar_mask=bytes([0b0101, 0, 0, 0]), repetition_penalty=2.0, output_token_ids=(1, 2)
        ),
        [1.0, -INF, 1.5, -INF],
    ),
    (
        "grammar that can go on before min tokens",
        spec(grammar_mask=bytes([0b0101, 0, 0, 0]), position=1, min_tokens=2, eos_token_ids=(0,)),
        [-INF, -INF, 3.0, -INF],
    ),
    (
        "grammar that can only end before min tokens",
        spec(
            grammar_mask=bytes([0b1001, 0, 0, 0]),
            position=1,
            min_tokens=2,
            eos_token_ids=(0,),
            stop_token_ids=[3],
        ),
        [1.0, -INF, -INF, 4.0],
    ),
    (
        "grammar that can only end, for all else is a bad word, before min tokens",
        spec(
            grammar_mask=bytes([0b0011, 0, 0, 0]),
            position=1,
            min_tokens=2,
            eos_token_ids=(0,),
            bad_word_ids=((1,),),
        ),
        [1.0, -INF, -INF, -INF],
    ),
    ("grammar that permits nothing", spec(grammar_mask=bytes(4)), [-INF] * 4),
    ("bias", spec(logit_bias={0: -1.5, 2: 10}), [-0.5, -2.0, 13.0, 4.0]),
    (
        "repetition divides positive and multiplies negative logits",
        spec(repetition_penalty=2.0, prompt_token_ids=(0,), output_token_ids=(1, 1)),
        [0.5, -4.0, 3.0, 4.0],
    ),
    (
        "frequency counts outputs only",
        spec(frequency_penalty=0.5, prompt_token_ids=(0,), output_token_ids=(3, 3, 1)),
        [1.0, -2.5, 3.0, 3.0],
    ),
    (
        "presence counts once",
        spec(presence_penalty=0.5, output_token_ids=(3, 3)),
        [1.0, -2.0, 3.0, 3.5],
    ),
    (
        "bias comes before repetition",
        spec(logit_bias={1: 4.0}, repetition_penalty=2.0, output_token_ids=(1,)),
        [1.0, 1.0, 3.0, 4.0],
    ),
    (
        "repetition comes before presence",
        spec(repetition_penalty=2.0, presence_penalty=1.0, output_token_ids=(3,)),
        [1.0, -2.0, 3.0, 1.0],
    ),
    (
        "a mask outlasts bias and penalties",
        spec(
            allowed_token_ids=[0], logit_bias={2: 100}, presence_penalty=-2, output_token_ids=(2,)
        ),
        [1.0, -INF, -INF, -INF],
    ),
]


@pytest.mark.parametrize(("name", "given", "expected"), CASES, ids=[case[0] for case in CASES])
def test_rules_change_exactly_what_they_say(
    name: str, given: SampleSpec, expected: list[float]
) -> None:
    row = [1.0, -2.0, 3.0, 4.0]
    assert applied(row, given) == expected
    if expected != row:
        assert has_rules(given)


def test_plain_request_has_no_rules() -> None:
    assert not has_rules(spec(temperature=0.0, top_k=3, top_p=0.5, eos_token_ids=(1,)))
