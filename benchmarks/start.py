"""W9: from the command line to the first token, files in the page cache.

    python benchmarks/start.py [--rounds R] [--save]

    heddle generate demo, one rank       <= 8 s
    the same over two ranks              <= 14 s

`heddle show`, which computes nothing, is to answer within a second. Whole commands are timed, from
the start of the process to its end, interleaved; the first run of each warms the files and what is
compiled once for a machine.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial

from support import Report, parser

from heddle.bench.timing import interleaved_seconds, summary

COMMANDS: dict[str, list[str]] = {
    "one rank": ["generate", "demo", "Hello", "--max-tokens", "1"],
    "two ranks": ["generate", "demo", "Hello", "--max-tokens", "1", "-pcp", "2", "-dcp", "2"],
    "show": ["show", "-pcp", "2", "-dcp", "2"],
}
MOST = {"one rank": 8.0, "two ranks": 14.0, "show": 1.0}


def main() -> int:
    arguments = parser(__doc__).parse_args()
    report = Report("start", "Start to first token")
    calls = {name: partial(run, words) for name, words in COMMANDS.items()}
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    found = {name: summary(times) for name, times in interleaved_seconds(calls, rounds).items()}
    rows = [[name, *times.values()] for name, times in found.items()]
    report.table("seconds", ["command", "median", "best"], rows)
    for name, times in found.items():
        report.target("W9", f"{name}: seconds", times["median_seconds"], at_most=MOST[name])
    return report.finish(arguments, found)


def run(words: list[str]) -> None:
    command = [sys.executable, "-m", "heddle", *words]
    subprocess.run(command, check=True, capture_output=True)


if __name__ == "__main__":
    raise SystemExit(main())
