"""The adapters of one rank: its share of each, in the slots of its products."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from heddle.models.adapters.folder import AdapterFolder
from heddle.models.adapters.slots import AdapterSite, AdapterSlots, LowRankPart


class AdapterStore:
    """Loads adapters into slots, and empties slots.

    Args:
        slots: of every product of this rank that takes adapters.
        dtype: compute dtype.
        device: of the weights.
    """

    def __init__(
        self, slots: Sequence[AdapterSlots], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._slots = tuple(slots)
        self._dtype = dtype
        self._device = device

    def change(self, slot: int, path: str | None) -> None:
        """Fill a slot from a folder, whatever it held; None empties it.

        Raises:
            ModelFileError, UnsupportedError: the folder is not what it was when it was checked.
        """
        for slots in self._slots:
            slots.clear(slot)
        if path is None:
            return
        with AdapterFolder(path) as adapter:
            for slots in self._slots:
                held = [site for site in slots.sites if site.module in adapter.modules]
                slots.put(slot, [self._load(adapter, site) for site in held])

    def _load(self, adapter: AdapterFolder, site: AdapterSite) -> LowRankPart:
        scale = adapter.modules[site.module].scale

        def up(outputs: tuple[int, int]) -> torch.Tensor:
            # Scaled before it is rounded to the compute dtype, as a merged weight would be.
            wide = adapter.up(site.module, outputs).to(torch.float64) * scale
            return wide.to(self._device, self._dtype).t().contiguous()

        down = adapter.down(site.module, site.inputs)
        return LowRankPart(
            down.to(self._device, self._dtype).t().contiguous(),
            tuple((place, up(outputs)) for place, outputs in site.pieces),
        )
