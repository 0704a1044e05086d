"""Visible keys, one by one, from the words of a rule: what every shortcut is compared with."""

from __future__ import annotations

from heddle.config.visibility import Visibility


def seen_by(rule: Visibility, position: int) -> list[int]:
    """Keys that a query at `position` sees, ascending."""
    keys = range(position + 1)
    if rule.kind == "chunk":
        return [key for key in keys if key // rule.size == position // rule.size]
    if rule.kind == "window":
        return [key for key in keys if position - key < rule.size or key < rule.num_first]
    return list(keys)
