"""Damaged words of whoever starts a program: a file of flags, variables, a batch of requests."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from heddle.cli.flags import engine_arguments
from heddle.cli.output import Output
from heddle.cli.run_batch_files import BatchOutput, read_batch
from heddle.cli.serve import create_parser
from heddle.cli.server_flags import server_config
from heddle.engine.args import engine_config
from heddle.errors import ConfigError, HeddleError
from tests.support.mutations import HOSTILE, mutated_bytes, mutated_json, try_mutants

COUNT = 120
FLAGS = """\
model: demo
tensor-parallel-size: 2
api-key: [one, two]
max-model-len: 32k
shutdown-timeout: 30
hf-overrides: '{"rope_theta": 5}'
enable-prefix-caching: true
"""
HOSTILE_WORDS = (
    *("", " ", "x", "-", "-1", "0", "1", "1e400", "nan", "-inf", "9" * 5000, "1k", "9" * 30 + "t"),
    *("{}", "[1]", "null", '{"a": NaN}', "[" * 5000, '{"a":' * 3000, '"' * 3, "true", "\ud800"),
    *(",", "=", ":", "0.0.0.0", "%s", "../..", "x" * 100_000),
)


def output() -> Output:
    return Output(as_json=False, stream=io.StringIO(), log=io.StringIO())


def use_words(words: list[str], environment: dict[str, str]) -> None:
    """What `serve` makes of its words, before it does anything."""
    arguments = create_parser(environment, output()).parse(words)
    server_config(arguments)
    engine_config(arguments.place or arguments.model or "", **engine_arguments(arguments))


def test_a_mutated_file_of_flags_is_refused_or_read(tmp_path: Path) -> None:
    path = tmp_path / "flags.yaml"
    good = FLAGS.encode()
    path.write_bytes(good)
    use_words(["--config", str(path)], {})

    def attempt(seed: int) -> None:
        path.write_bytes(mutated_bytes(good, seed))
        use_words(["--config", str(path)], {})

    found = try_mutants(range(COUNT), attempt)
    assert min(found.num_taken, found.num_refused) > COUNT // 40


def test_no_value_of_a_flag_in_a_file_is_more_than_refused(tmp_path: Path) -> None:
    path = tmp_path / "flags.yaml"
    names = ("tensor-parallel-size", "hf-overrides", "port", "served-model-name")

    def attempt(seed: int) -> None:
        name, value = names[seed % len(names)], HOSTILE[seed]
        try:
            path.write_text(json.dumps({"model": "demo", name: value}))
        except ValueError:  # more digits than Python writes
            path.write_text(f"{{model: demo, {name}: 1{'0' * 5000}}}")
        use_words(["--config", str(path)], {})

    found = try_mutants(range(len(HOSTILE)), attempt)
    assert min(found.num_taken, found.num_refused) > 2


@pytest.mark.parametrize(
    "text", ["a: &a [*a]", "&a [*a]", "!!python/object/apply:os.system [x]", "? [1]\n: 2", "\x00"]
)
def test_yaml_beyond_words_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--config"):
        use_words(["--config", str(path)], {})


def test_yaml_that_unfolds_is_refused_soon(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    path = tmp_path / "flags.yaml"
    path.write_text("\n".join(lines))  # 9**12 words, written out

    def attempt(seed: int) -> None:
        use_words(["--config", str(path)], {})

    found = try_mutants([0], attempt, (ConfigError,))
    assert found.num_refused == 1
    assert found.peak_bytes < 16 << 20


# Steps prime to the number of words: each name and each word are tried often.
@pytest.mark.parametrize("step", [37, pytest.param(1, marks=pytest.mark.slow)])
def test_no_variable_is_more_than_refused(step: int) -> None:
    names = sorted({flag.dest for flag in create_parser({}, output()).flags.values()} - {"help"})
    cases = [(name, word) for name in names for word in HOSTILE_WORDS]
    assert len(cases) > 1000

    def attempt(seed: int) -> None:
        name, word = cases[seed]
        use_words(["demo"], {f"HEDDLE_{name.upper()}": word})

    found = try_mutants(range(0, len(cases), step), attempt)
    assert min(found.num_taken, found.num_refused) > 15


LINES = b"".join(
    json.dumps(
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "a", "max_tokens": number},
        }
    ).encode()
    + b"\n"
    for number in range(3)
)


def test_a_mutated_batch_is_refused_or_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    problems = 0

    def attempt(seed: int) -> None:
        nonlocal problems
        path.write_bytes(mutated_bytes(LINES, seed))
        for line in read_batch(path):
            assert (line.problem is None) == (line.body is not None)
            problems += line.problem is not None

    found = try_mutants(range(COUNT), attempt)
    assert found.num_taken > COUNT // 2
    assert problems > COUNT // 20


def test_mutated_lines_of_a_batch_are_told_or_asked(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    good = json.loads(LINES.splitlines()[0])

    def attempt(seed: int) -> None:
        try:
            text = json.dumps(mutated_json(good, seed))
        except ValueError:
            text = "1" * 5000
        path.write_text(f"{text}\n")
        (line,) = read_batch(path)
        assert line.problem is None or "line" not in line.problem

    assert try_mutants(range(COUNT), attempt).num_taken == COUNT


def test_a_mutated_output_of_a_batch_is_refused_or_taken_up(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    good = b"".join(
        json.dumps({"id": "x", "custom_id": f"r{i}", "response": {}, "error": None}).encode()
        + b"\n"
        for i in range(3)
    )

    def attempt(seed: int) -> None:
        path.write_bytes(mutated_bytes(good, seed))
        out = BatchOutput(path, {"r0", "r1", "r2"})
        out.close()
        assert out.done <= {"r0", "r1", "r2"}

    found = try_mutants(range(COUNT), attempt, (HeddleError,))
    assert min(found.num_taken, found.num_refused) > COUNT // 20
