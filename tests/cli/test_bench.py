from __future__ import annotations

import json

import pytest

from heddle.cli.bench import DEFAULTS, SUBJECTS, create_parser, settings
from heddle.cli.main import main
from heddle.cli.output import Output
from heddle.errors import ConfigError


def asked(*words):
    return settings(create_parser({}, Output()).parse(words))


def test_every_subject_has_its_own_defaults():
    for subject in SUBJECTS:
        assert asked(subject) == DEFAULTS[subject]
    assert len(SUBJECTS) == 5


def test_given_values_replace_defaults():
    found = asked("latency", "demo", "--prompt-lens", "1k", "2K", "--rounds", "3", "--vs", "a", "b")
    assert found["prompt_lens"] == [1000, 2048]
    assert (found["rounds"], found["vs"]) == (3, ["a", "b"])
    assert found["max_tokens"] == DEFAULTS["latency"]["max_tokens"]


@pytest.mark.parametrize(
    "words",
    [
        ("latency", "--streams", "2"),
        ("throughput", "--new-rows", "2"),
        ("attention", "--vs", "transformers"),
        ("attention", "--max-tokens", "8"),
        ("exchange", "--rounds", "2"),
        ("step", "--vs", "transformers"),
        ("step", "--peers-dir", "x"),
    ],
    ids=" ".join,
)
def test_a_flag_without_effect_is_refused_and_all_named_ones_are_accepted(words):
    with pytest.raises(ConfigError, match=f"{words[1]} has no effect on heddle bench") as refused:
        asked(*words)
    named = str(refused.value).partition("it has: ")[2].split(", ")
    parser = create_parser({}, Output())
    assert all(flag in parser.flags for flag in named if flag.startswith("--"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("latency", "--max-tokens", "1"), r"--max-tokens 1 .*nearest: 2"),
        (("latency", "--rounds", "0"), r"--rounds 0 .*nearest: 1"),
        (("latency", "--prompt-lens", "0"), r"--prompt-lens 0 .*nearest: 1"),
        (("throughput", "--streams", "2", "0"), r"--streams 0 .*nearest: 1"),
        (("throughput", "--prompt-lens", "8", "9"), "takes one --prompt-lens; 2 are given"),
        (("step", "--streams", "2", "3"), "takes one --streams; 2 are given"),
    ],
    ids=str,
)
def test_counts_are_checked(words, message):
    with pytest.raises(ConfigError, match=message):
        asked(*words)


@pytest.mark.parametrize("words", [("bench",), ("bench", "nothing")], ids=" ".join)
def test_an_unknown_subject_is_refused(words, capsys):
    assert main(list(words)) == 2
    assert "heddle bench" in capsys.readouterr().err


def test_a_peer_that_is_absent_is_said_before_anything_loads(tmp_path, capsys):
    words = ["bench", "latency", "demo", "--vs", "nobody", "--peers-dir", str(tmp_path)]
    assert main(words) == 2
    assert "peer 'nobody' is not set up" in capsys.readouterr().err


def test_latency_of_a_tiny_model(tiny_folder, capsys):
    words = ["bench", "latency", str(tiny_folder), "--prompt-lens", "9", "--max-tokens", "3"]
    assert (
        main(
            [
                *words,
                "--rounds",
                "1",
                "--kernels",
                "torch",
                "--attention-backend",
                "torch",
                "--json",
            ]
        )
        == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert document["subject"] == "latency"
    (case,) = document["prompts"]
    (engine,) = case["engines"]
    assert (case["prompt_len"], engine["name"], engine["agrees"]) == (9, "heddle", True)
    assert engine["decode_tok_s"] > 0


def test_parts_of_a_step_of_a_tiny_model(tiny_folder, capsys):
    words = ["bench", "step", str(tiny_folder), "--prompt-lens", "9", "--streams", "2"]
    assert (
        main([*words, "--max-tokens", "3", "--kernels", "torch", "--attention-backend", "torch"])
        == 0
    )
    text = capsys.readouterr().out
    for part in ("schedule", "plan", "messages", "localize", "sample", "model"):
        assert part in text
