"""Exchanges by name; each is imported when it is chosen."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple

from heddle.attention.exchange.base import Exchange
from heddle.comm.base import Communicator
from heddle.comm.solo import SoloCommunicator
from heddle.errors import ConfigError
from heddle.kernels.registry import Kernels


class _Settings(NamedTuple):
    """What `create_exchange` was asked for."""

    replicas: Communicator
    keeps_lse: bool
    strict: bool
    kernels: Kernels | None


def _create_ag_rs(settings: _Settings) -> Exchange:
    from heddle.attention.exchange.ag_rs import AllGatherReduceScatter

    return AllGatherReduceScatter(strict=settings.strict, kernels=settings.kernels)


def _create_ag_ar(settings: _Settings) -> Exchange:
    from heddle.attention.exchange.ag_ar import AllGatherAllReduce

    return AllGatherAllReduce(strict=settings.strict, kernels=settings.kernels)


def _create_a2a(settings: _Settings) -> Exchange:
    from heddle.attention.exchange.a2a import AllToAll

    return AllToAll(strict=settings.strict, kernels=settings.kernels)


def _create_a2a_fine(settings: _Settings) -> Exchange:
    from heddle.attention.exchange.a2a_fine import FineAllToAll

    return FineAllToAll(
        settings.replicas,
        keeps_lse=settings.keeps_lse,
        strict=settings.strict,
        kernels=settings.kernels,
    )


EXCHANGES: MappingProxyType[str, Callable[[_Settings], Exchange]] = MappingProxyType(
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
    kernels: Kernels | None = None,
) -> Exchange:
    """Make an exchange.

    Args:
        name: a key of `EXCHANGES`.
        replicas: the PCP ranks of the DCP group; None: there is one.
        keeps_lse: the merged lse is needed, not the output alone.
        strict: raise on NaN or inf where keys were seen. Otherwise such rows come out as NaN, so
            that one request fails and the others go on.
        kernels: who packs and merges; None: torch.

    Raises:
        ConfigError: unknown name.
    """
    if name not in EXCHANGES:
        raise ConfigError(
            f"exchange {name!r} is not known; the exchanges are {', '.join(EXCHANGES)}"
        )
    group = SoloCommunicator() if replicas is None else replicas
    return EXCHANGES[name](_Settings(group, keeps_lse, strict, kernels))
