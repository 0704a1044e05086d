"""One progress bar, on a terminal only."""

from __future__ import annotations

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


def _nothing() -> None:
    return
