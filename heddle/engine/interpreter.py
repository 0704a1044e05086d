"""Another interpreter like this one. A module of its own: helpers import little else."""

from __future__ import annotations

import os
import sys


def interpreter_command(module: str, function: str, *arguments: object) -> list[str]:
    """Command line of an interpreter that finds what this one finds, and calls one function.

    `-c` instead of `-m`: the path must be set before anything is imported.
    """
    call = ", ".join(map(repr, arguments))
    path = [os.path.abspath(entry) for entry in sys.path]
    line = f"import sys; sys.path[:] = {path!r}; import {module} as m; m.{function}({call})"
    return [sys.executable, "-c", line]
