from __future__ import annotations

from dataclasses import dataclass

from heddle.cli.fieldtext import field_texts


@dataclass
class Sample:
    """Of the class, not of a field."""

    alone: int = 0
    told: int = 1
    """What it
    means."""
    last: int = 2


def test_a_text_belongs_to_the_field_above_it():
    assert field_texts(Sample) == {"told": "What it means."}
