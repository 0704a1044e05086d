"""What a launcher such as torchrun told this process, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from heddle.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchInfo:
    """One process among those that a launcher started."""

    rank: int
    """Global rank."""
    world_size: int
    """Processes started, on all hosts."""
    local_world_size: int
    """Processes started on this host."""
    master_address: str | None = None
    """Where all ranks meet: a name or an address of global rank 0's host."""
    interface: str | None = None
    """Network interface that the user chose for gloo."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self | None:
        """Read `RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, and the optional `MASTER_ADDR` and
        `GLOO_SOCKET_IFNAME`; None without a launcher.

        Raises:
            ConfigError: a value is no number, or the rank lies outside the world.
        Example:
            >>> LaunchInfo.from_environment({"RANK": "1", "WORLD_SIZE": "2"}).local_world_size
            1
            >>> LaunchInfo.from_environment({}) is None
            True
        """
        if "RANK" not in environment or "WORLD_SIZE" not in environment:
            return None
        names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        words = {name: environment.get(name, "1") for name in names}
        for name, word in words.items():
            if not word.isdecimal():
                raise ConfigError(f"{name}={word!r}; a launcher sets it to a whole number >= 0")
        rank, world_size, local_world_size = map(int, words.values())
        if rank >= world_size:
            raise ConfigError(
                f"RANK={rank} with WORLD_SIZE={world_size}; a rank is below the number of processes"
            )
        return cls(
            rank=rank,
            world_size=world_size,
            local_world_size=local_world_size,
            master_address=environment.get("MASTER_ADDR") or None,
            interface=environment.get("GLOO_SOCKET_IFNAME") or None,
        )

    def check_world(self, world_size: int) -> None:
        """Raise unless the launcher started as many processes as the layout has ranks.

        Raises:
            ConfigError: the numbers differ.
        """
        if self.world_size != world_size:
            raise ConfigError(
                f"the launcher started {self.world_size} processes, the layout has {world_size} "
                "ranks; the two must be equal (tensor parallel size times prefill context parallel "
                "size; decode context parallelism adds no ranks)"
            )
