from __future__ import annotations

from heddle.cli.flags import ENGINE_FLAGS, LAYOUT_FLAGS
from heddle.cli.foreign import FOREIGN_FLAGS
from heddle.cli.parser import normalise


def test_no_flag_is_both_ours_and_foreign():
    ours = {name for flag in LAYOUT_FLAGS + ENGINE_FLAGS for name in flag.names}
    assert len(ours) > 20
    assert not ours & set(FOREIGN_FLAGS)


def test_every_row_is_normalised_and_has_a_reason():
    assert len(FOREIGN_FLAGS) > 20
    for name, flag in FOREIGN_FLAGS.items():
        assert name.startswith("--")
        assert normalise(name) == name
        assert len(flag.why.split()) > 1
