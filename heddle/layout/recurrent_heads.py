"""Which part of a recurrent layer a tensor-parallel rank holds: heads, channels, state.

Heads are cut over TP like query heads, and the key heads (or groups of B and C) that they share
follow them, so `HeadLayout` gives the cut: value heads read key heads as query heads read kv heads.
PCP ranks hold copies of the state and DCP does not touch it.

    channels of a rank    | query (or C) | key (or B) | value |    what the convolution sees

Legend: `h` heads of a rank that hold a state, `K` and `V` key and value width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from heddle.config.model import RecurrentConfig
from heddle.layout.heads import HeadLayout


@dataclass(frozen=True)
class RecurrentLayout:
    """The cut of every recurrent layer of a model.

    Raises:
        TopologyError: key heads do not divide the heads, or a rank would have no head.
    """

    config: RecurrentConfig
    tp_size: int

    def __post_init__(self) -> None:
        _ = self._heads  # refuses cuts that are not legal

    @cached_property
    def _heads(self) -> HeadLayout:
        return HeadLayout(
            num_query_heads=self.config.num_heads,
            num_kv_heads=self.config.num_key_heads,
            tp_size=self.tp_size,
            slice_size=1,
        )

    def head_range(self, tp_rank: int) -> tuple[int, int]:
        """Global heads [start, end) whose state a rank holds."""
        return self._heads.query_range(tp_rank)

    def key_range(self, tp_rank: int) -> tuple[int, int]:
        """Global key heads [start, end) that those heads read; a cut may share one."""
        return self._heads.kv_range(tp_rank)

    def key_index(self, tp_rank: int) -> tuple[int, ...]:
        """For each head of a rank, its key head counted from the rank's first one.

        Example:
            >>> config = RecurrentConfig(
            ...     method="gated_delta",
            ...     num_heads=10,
            ...     num_key_heads=2,
            ...     key_dim=4,
            ...     value_dim=4,
            ...     norm_groups=10,
            ... )
            >>> RecurrentLayout(config, 2).key_index(1), RecurrentLayout(config, 3).key_index(1)
            ((0, 0, 0, 0, 0), (0, 0, 1))
        """
        return tuple(
            run.kv_index for run in self._heads.runs(tp_rank) for _ in range(run.start, run.end)
        )

    def num_channels(self, tp_rank: int) -> int:
        """Channels of a rank that pass through the convolution."""
        (first, last), (first_key, last_key) = self.head_range(tp_rank), self.key_range(tp_rank)
        keys, values = last_key - first_key, last - first
        return 2 * keys * self.config.key_dim + values * self.config.value_dim

    def state_shape(self, tp_rank: int) -> tuple[int, int, int]:
        """`[h, K, V]` of one sequence and layer."""
        first, last = self.head_range(tp_rank)
        return last - first, self.config.key_dim, self.config.value_dim

    def history_shape(self, tp_rank: int) -> tuple[int, int]:
        """`[conv_kernel - 1, channels]`: inputs of the convolution that a sequence remembers."""
        rows = max(0, self.config.conv_kernel - 1)
        return rows, self.num_channels(tp_rank) if rows else 0

    @property
    def map_width(self) -> int:
        """Elements per head of a segment's affine map: its `Psi [K, V]`, then its `Phi`, a matrix
        `[K, K]` under the delta rule and one number elsewhere.
        """
        config = self.config
        phi = config.key_dim**2 if config.method == "gated_delta" else 1
        return config.key_dim * config.value_dim + phi

    @property
    def num_norm_sums(self) -> int:
        """Sums of squares per row that the output norm adds over TP: one per group of heads, or 0
        where every group lies on one rank. The same on all ranks.
        """
        size = self.config.num_heads // self.config.norm_groups
        cuts = (self.head_range(rank)[0] for rank in range(self.tp_size))
        return self.config.norm_groups if any(cut % size for cut in cuts) else 0

    def slot_bytes(self, tp_rank: int, state_bytes: int, history_bytes: int) -> int:
        """Memory of one sequence in one layer on a rank, from the bytes of an element."""
        heads, key, value = self.state_shape(tp_rank)
        rows, channels = self.history_shape(tp_rank)
        return heads * key * value * state_bytes + rows * channels * history_bytes
