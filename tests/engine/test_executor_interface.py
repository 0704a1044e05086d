from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import psutil
import pytest

from heddle.engine.executors import interface
from heddle.engine.executors.interface import (
    LOOPBACK,
    choose_interface,
    interface_of,
    source_address,
)
from heddle.engine.executors.launch_info import LaunchInfo

SPREAD = LaunchInfo(rank=0, world_size=4, local_world_size=2)
NOWHERE = "no-such-host.invalid"


def entries(*addresses: str) -> list[SimpleNamespace]:
    return [SimpleNamespace(address=address) for address in addresses]


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with an address in each of two networks."""
    cards = {
        LOOPBACK: entries("127.0.0.1", "::1"),
        "outer": entries("192.0.2.5", "fe80::5%outer"),
        "inner": entries("198.51.100.5", "fe80::6%inner", "02:fc:00:00:00:01"),
    }
    ways = {
        "192.0.2.9": "192.0.2.5",
        "198.51.100.9": "198.51.100.5",
        "198.51.100.5": "198.51.100.5",
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: cards)
    monkeypatch.setattr(interface, "source_address", ways.get)


@pytest.mark.parametrize(
    ("master", "name"),
    [
        ("192.0.2.9", "outer"),
        ("198.51.100.9", "inner"),
        ("198.51.100.5", "inner"),  # this host is the master
        (NOWHERE, None),
        (None, None),
    ],
)
def test_ranks_of_several_hosts_offer_the_interface_toward_the_master(
    two_cards: None, master: str | None, name: str | None
) -> None:
    assert choose_interface(dataclasses.replace(SPREAD, master_address=master)) == name


def test_ranks_of_one_host_stay_on_loopback() -> None:
    alone = LaunchInfo(rank=0, world_size=2, local_world_size=2, master_address="192.0.2.9")
    assert choose_interface(alone) == LOOPBACK


def test_the_user_s_choice_comes_first() -> None:
    for local in (2, 4):
        launch = dataclasses.replace(SPREAD, local_world_size=local, interface="ib0")
        assert choose_interface(launch) == "ib0"


def test_an_address_belongs_to_the_interface_that_holds_it(two_cards: None) -> None:
    assert interface_of("198.51.100.5") == "inner"
    assert interface_of("fe80::6") == "inner"
    assert interface_of("203.0.113.1") is None
    assert interface_of("127.0.0.2") == LOOPBACK  # all of 127.0.0.0/8


def test_the_way_to_this_host_starts_at_the_address_that_was_named() -> None:
    assert source_address("127.0.0.1") == "127.0.0.1"
    assert source_address(NOWHERE) is None
