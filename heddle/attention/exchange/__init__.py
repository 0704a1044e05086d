"""Exchanges by name; each is imported when it is chosen."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from heddle.attention.exchange.base import Exchange
from heddle.errors import ConfigError


def _create_ag_rs(*, strict: bool) -> Exchange:
    from heddle.attention.exchange.ag_rs import AllGatherReduceScatter

    return AllGatherReduceScatter(strict=strict)


def _create_ag_ar(*, strict: bool) -> Exchange:
    from heddle.attention.exchange.ag_ar import AllGatherAllReduce

    return AllGatherAllReduce(strict=strict)


def _create_a2a(*, strict: bool) -> Exchange:
    from heddle.attention.exchange.a2a import AllToAll

    return AllToAll(strict=strict)


EXCHANGES: MappingProxyType[str, Callable[..., Exchange]] = MappingProxyType(
    {
        "ag_rs": _create_ag_rs,
        "ag_ar": _create_ag_ar,
        "a2a": _create_a2a,
    }
)
"""Creators. In a group of one nothing is exchanged, so none is asked for."""


def create_exchange(name: str, *, strict: bool = False) -> Exchange:
    """Make an exchange.

    Args:
        name: a key of `EXCHANGES`.
        strict: raise on NaN or inf where keys were seen. Otherwise such rows come out as NaN, so
            that one request fails and the others go on.

    Raises:
        ConfigError: unknown name.
    """
    if name not in EXCHANGES:
        raise ConfigError(
            f"exchange {name!r} is not known; the exchanges are {', '.join(EXCHANGES)}"
        )
    return EXCHANGES[name](strict=strict)
