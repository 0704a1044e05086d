"""Exchanges by name; each is imported when it is chosen."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from heddle.attention.exchange.base import Exchange
from heddle.comm.base import Communicator
from heddle.comm.solo import SoloCommunicator
from heddle.errors import ConfigError


def _create_ag_rs(replicas: Communicator, *, keeps_lse: bool, strict: bool) -> Exchange:  # noqa: ARG001 - one signature for all
    from heddle.attention.exchange.ag_rs import AllGatherReduceScatter

    return AllGatherReduceScatter(strict=strict)


def _create_ag_ar(replicas: Communicator, *, keeps_lse: bool, strict: bool) -> Exchange:  # noqa: ARG001
    from heddle.attention.exchange.ag_ar import AllGatherAllReduce

    return AllGatherAllReduce(strict=strict)


def _create_a2a(replicas: Communicator, *, keeps_lse: bool, strict: bool) -> Exchange:  # noqa: ARG001
    from heddle.attention.exchange.a2a import AllToAll

    return AllToAll(strict=strict)


def _create_a2a_fine(replicas: Communicator, *, keeps_lse: bool, strict: bool) -> Exchange:
    from heddle.attention.exchange.a2a_fine import FineAllToAll

    return FineAllToAll(replicas, keeps_lse=keeps_lse, strict=strict)


EXCHANGES: MappingProxyType[str, Callable[..., Exchange]] = MappingProxyType(
    {
        "ag_rs": _create_ag_rs,
        "ag_ar": _create_ag_ar,
        "a2a": _create_a2a,
        "a2a_fine": _create_a2a_fine,
    }
)
"""Creators. In a group of one nothing is exchanged, so none is asked for."""


def create_exchange(
    name: str,
    replicas: Communicator | None = None,
    *,
    keeps_lse: bool = True,
    strict: bool = False,
) -> Exchange:
    """Make an exchange.

    Args:
        name: a key of `EXCHANGES`.
        replicas: the PCP ranks of the DCP group; None: there is one.
        keeps_lse: the merged lse is needed, not the output alone.
        strict: raise on NaN or inf where keys were seen. Otherwise such rows come out as NaN, so
            that one request fails and the others go on.

    Raises:
        ConfigError: unknown name.
    """
    if name not in EXCHANGES:
        raise ConfigError(
            f"exchange {name!r} is not known; the exchanges are {', '.join(EXCHANGES)}"
        )
    group = SoloCommunicator() if replicas is None else replicas
    return EXCHANGES[name](group, keeps_lse=keeps_lse, strict=strict)
