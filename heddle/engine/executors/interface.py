"""Which network interface a launched rank offers to its peers.

gloo tells the peers the address of one interface. Left alone it takes the one that the host's own
name resolves to, which on many machines is loopback: such a rank can be reached by nobody else. A
launcher has named the address where all ranks meet; the interface whose address this host uses on
the way there is one that the other hosts can reach too.
"""

from __future__ import annotations

import socket
import sys

import psutil

from heddle.engine.executors.launch_info import LaunchInfo

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_ANY_PORT = 9
"""No packet is sent: connecting a datagram socket only looks up the route."""


def choose_interface(launch: LaunchInfo) -> str | None:
    """Name of the interface for gloo; None: gloo's own choice.

    The user's choice first, then loopback for ranks of one host, then the way to the master.

    Args:
        launch: of this process.
    Example:
        >>> alone = LaunchInfo(rank=0, world_size=2, local_world_size=2)
        >>> choose_interface(alone) == LOOPBACK
        True
    """
    if launch.interface is not None:
        return launch.interface
    if launch.local_world_size == launch.world_size:
        return LOOPBACK
    address = None if launch.master_address is None else source_address(launch.master_address)
    return None if address is None else interface_of(address)


def source_address(target: str) -> str | None:
    """The address that this host sends from when it talks to a name or address; None: no way there.

    Example:
        >>> source_address("127.0.0.1")
        '127.0.0.1'
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(target, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError:
        return None  # the rendezvous will say what is wrong, with the address in its words


def interface_of(address: str) -> str | None:
    """The interface that holds an address of this host; loopback holds all of 127.0.0.0/8."""
    if address.startswith("127."):
        return LOOPBACK
    for name, entries in psutil.net_if_addrs().items():
        # A link-local IPv6 address carries its interface behind a percent sign.
        if any(entry.address.split("%")[0] == address for entry in entries):
            return str(name)
    return None
