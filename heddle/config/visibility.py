"""Which keys a query sees, by position: the one definition for caches, plans, masks and planners.

    full                [0, p]
    window w            [p - w + 1, p], and with `num_first` also [0, num_first)
    chunk w             [w * (p // w), p]

Every function takes ints or integer arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Visibility:
    """The visible keys of a layer kind.

    Raises:
        ValueError: a size that the kind cannot have.
    """

    kind: Literal["full", "window", "chunk"] = "full"
    size: int = 0
    """`w`, in tokens: of a window with the query itself, or of a chunk; 0 for `full`."""
    num_first: int = 0
    """Leading tokens that a window always sees beside its own (0 for other kinds)."""

    def __post_init__(self) -> None:
        if (self.size == 0) != (self.kind == "full") or self.size < 0:
            raise ValueError(f"size={self.size} is not legal for kind={self.kind}")
        if self.num_first < 0 or (self.num_first and self.kind != "window"):
            raise ValueError(f"num_first={self.num_first} is not legal for kind={self.kind}")

    @property
    def is_full(self) -> bool:
        """Every earlier key is seen."""
        return self.kind == "full"

    def start(self, position: Any) -> Any:
        """First key of the main range of a query at `position`; the range ends at `position`.

        Example:
            >>> Visibility("window", 4).start(10), Visibility("chunk", 4).start(10)
            (7, 8)
        """
        if self.kind == "window":
            first = position + 1 - self.size
            return max(first, 0) if isinstance(first, int) else first.clip(min=0)
        if self.kind == "chunk":
            return position // self.size * self.size
        return position * 0

    def first_end(self, position: Any) -> Any:
        """End of the range of first tokens that a query sees beside its main range; 0 if none.

        Example:
            >>> rule = Visibility("window", 4, num_first=2)
            >>> rule.first_end(2), rule.first_end(4), rule.first_end(9)
            (0, 1, 2)
        """
        start = self.start(position)
        if isinstance(start, int):
            return min(start, self.num_first)
        return start.clip(max=self.num_first)

    def needed_from(self, position: int) -> int:
        """First key, past the first tokens, that any query at `position` or later can see.

        Example:
            >>> Visibility("window", 4).needed_from(10), Visibility("chunk", 4).needed_from(8)
            (7, 8)
        """
        start: int = self.start(position)
        return start


FULL = Visibility()
