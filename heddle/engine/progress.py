"""Progress bars, on a terminal only: prompts that are done, and weights that are loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int, *, enabled: bool) -> Iterator[Callable[[], None]]:
    """Yield a function that moves the bar by one prompt.

    Args:
        total: prompts in all.
        enabled: False: no bar, and its library is not imported.
    """
    if not enabled:
        yield _nothing
        return
    from tqdm import tqdm

    # `disable=None` shows the bar only where stderr is a terminal.
    with tqdm(total=total, desc="Processed prompts", disable=None, dynamic_ncols=True) as bar:

        def advance() -> None:
            bar.update(1)

        yield advance


@contextmanager
def loading_bar() -> Iterator[Callable[[int, int, int], None]]:
    """Yield a listener for (rank, tensors loaded, tensors in all); the bar is rank 0's."""
    if not sys.stderr.isatty():
        yield _no_report
        return
    from tqdm import tqdm

    with tqdm(desc="Loading weights", unit=" tensors", dynamic_ncols=True) as bar:

        def report(rank: int, done: int, total: int) -> None:
            if rank == 0:
                bar.total = total
                bar.update(done - bar.n)

        yield report


def line_on_terminal(line: str) -> None:
    """Show a line where stderr is a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"{line}\n")


def _nothing() -> None:
    return


def _no_report(rank: int, done: int, total: int) -> None:
    del rank, done, total
