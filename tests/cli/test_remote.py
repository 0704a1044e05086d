from __future__ import annotations

import argparse

import pytest

from heddle.cli.flags import ENGINE_FLAGS, LAYOUT_FLAGS
from heddle.cli.remote import is_url, refuse_engine_flags
from heddle.errors import ConfigError


def defaults(**changes):
    values = {flag.variable: flag.default for flag in (*LAYOUT_FLAGS, *ENGINE_FLAGS)}
    return argparse.Namespace(**values | changes)


def test_urls_are_told_from_models():
    assert is_url("https://example.org/v1")
    assert not is_url("httpd")
    assert not is_url("org/model")


def test_layout_and_engine_flags_say_nothing_to_a_server():
    refuse_engine_flags(defaults())
    with pytest.raises(ConfigError, match="-size has no effect on a server elsewhere"):
        refuse_engine_flags(defaults(tensor_parallel_size=2))
    with pytest.raises(ConfigError, match="--max-num-seqs has no effect"):
        refuse_engine_flags(defaults(max_num_seqs=3))
