from __future__ import annotations

import pytest

from heddle.config import CacheConfig
from heddle.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_pinned_tokens": -1}, "max_pinned_tokens=-1 is not legal; it is at least 0"),
        ({"max_pinned_tokens": True}, "max_pinned_tokens=True is not legal; it is a whole number"),
        (
            {"max_pinned_tokens": 64, "enable_prefix_caching": False},
            "max_pinned_tokens=64 is not legal without the prefix cache",
        ),
    ],
)
def test_what_is_not_legal_is_refused_with_the_rule(fields, message):
    with pytest.raises(ConfigError, match=message):
        CacheConfig(**fields)


def test_what_a_message_offers_is_legal():
    CacheConfig(max_pinned_tokens=0, enable_prefix_caching=False)
    CacheConfig(max_pinned_tokens=64, enable_prefix_caching=True)
