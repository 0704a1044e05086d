"""Attention on a GPU through libraries that are no dependency: FlashInfer and flash-attn.

Both offer one call for one sequence, with masks aligned at the bottom right:

    R rows, L keys     row i sees keys [0, L)                          constant
                       row i sees keys [0, L - R + i]                  causal
                       the same, but the last `window` of them only    band

So every stretch of rows (see `stretches`) is one call over the keys between its borders; rows that
form no stretch are calls of their own. Heads go in groups of equal runs (see `head_groups`).

What has been run: all of this file but `_flashinfer` and `_flash_attn`, with a plain kernel of the
documented semantics in their place. Those two follow the public documentation and have **not** been
run by this project, whose machines have no GPU; tests marked `gpu` run them where they are
installed. Both round a partial output to the 16 bits of the query before it is merged, which no
backend of ours does.

Legend: `R` rows, `h` lanes, `Kg` kv heads of a group, `L` keys, `D` head width.
Source: https://docs.flashinfer.ai/generated/flashinfer.prefill.single_prefill_with_kv_cache.html
(its lse has base 2: `get_lse` in include/flashinfer/attention/state.cuh), and the docstring of
`flash_attn_func` in https://github.com/Dao-AILab/flash-attention, from 2.6 on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import NamedTuple

import torch

from heddle.attention.backends.base import IntArray, Visible, checked_visible
from heddle.attention.backends.head_groups import group_runs
from heddle.attention.backends.stretches import Stretch, find_stretches
from heddle.attention.state import AttentionState, accumulation_dtype
from heddle.layout.heads import HeadRun

_FLOATS = (torch.float16, torch.bfloat16)
_LEAST_CAPABILITY = (8, 0)


class Mask(NamedTuple):
    """Which of the given keys a row sees, aligned at the bottom right."""

    is_causal: bool
    window: int | None = None
    """The last keys that a row of a causal call sees; None: all."""


Kernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, float, float, Mask],
    AttentionState,
]
"""Query `[R, h, D]`, key and value `[L, Kg, D]`, scale, softcap, mask -> lse `[R, h]`; lanes read
kv head `lane // (h / Kg)`.
"""


class LibraryBackend:
    """An attention library behind the seam of backends."""

    def __init__(
        self, name: str, module: str, kernel: Kernel, fits: Callable[[int, int], bool], widths: str
    ) -> None:
        """Note what serves.

        Args:
            name: in the registry.
            module: that is imported when the kernel is called.
            kernel: one call of the library.
            fits: whether it can serve a key width and a value width.
            widths: the same in words.
        """
        self.name = name
        self._module = module
        self._kernel = kernel
        self._fits = fits
        self._widths = widths

    def unsupported_reasons(
        self, *, dtype: torch.dtype, device: torch.device, key_width: int, value_width: int
    ) -> list[str]:
        """See `AttentionBackend.unsupported_reasons`."""
        reasons = []
        if find_spec(self._module) is None:
            reasons.append(f"module {self._module} is not installed; backend 'torch' needs none")
        if dtype not in _FLOATS:
            reasons.append(f"dtype {dtype}; backend {self.name!r} needs float16 or bfloat16")
        if device.type != "cuda":
            reasons.append(f"device {device.type}; backend {self.name!r} needs cuda")
        elif torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
            reasons.append("compute capability below 8.0")
        if not self._fits(key_width, value_width):
            reasons.append(f"widths {key_width} and {value_width}; must be {self._widths}")
        return reasons

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        runs: Sequence[HeadRun],
        visible: Visible,
        scale: float,
        softcap: float = 0.0,
    ) -> AttentionState:
        """See `AttentionBackend.attend`."""
        first, end = checked_visible(visible, len(query), len(key))
        dtype = accumulation_dtype(query.dtype, key.dtype, value.dtype)
        shape = (*query.shape[:2], value.shape[-1])
        whole = AttentionState.nil(shape, dtype=dtype, device=query.device)
        for group in group_runs(runs):
            lanes = slice(group.start, group.end)
            keys, values = group.heads(key), group.heads(value)
            for rows, seen, mask in _calls(first, end):
                part = self._kernel(
                    query[rows, lanes].contiguous(), keys[seen], values[seen], scale, softcap, mask
                )
                whole.out[rows, lanes], whole.lse[rows, lanes] = part.out, part.lse
        return whole


def _calls(first: IntArray, end: IntArray) -> Iterator[tuple[slice, slice, Mask]]:
    """Rows, keys and mask of each call; together they cover the rows that see a key."""
    stretches = find_stretches(first, end)
    if stretches is None:
        stretches = [
            Stretch(row, row + 1, int(first[row]), int(end[row]), "constant")
            for row in range(len(end))
            if first[row] < end[row]
        ]
    for start, stop, first_key, end_key, pattern in stretches:
        rows, count = slice(start, stop), stop - start
        match pattern:
            case "constant":
                yield rows, slice(first_key, end_key), Mask(is_causal=False)
            case "causal":
                yield rows, slice(first_key, end_key + count), Mask(is_causal=True)
            case "band":
                seen = slice(first_key, end_key + count - 1)
                yield rows, seen, Mask(is_causal=True, window=end_key - first_key)


def _flashinfer(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    softcap: float,
    mask: Mask,
) -> AttentionState:
    """One call of FlashInfer; its windows count the keys left of a row's own."""
    from flashinfer import single_prefill_with_kv_cache

    out, lse = single_prefill_with_kv_cache(
        query,
        key.contiguous(),
        value.contiguous(),
        causal=mask.is_causal,
        kv_layout="NHD",
        sm_scale=scale,
        window_left=-1 if mask.window is None else mask.window - 1,
        logits_soft_cap=softcap,
        return_lse=True,
    )
    return AttentionState.from_base2(out, lse)


def _flash_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    softcap: float,
    mask: Mask,
) -> AttentionState:
    """One call of flash-attn; it wants a batch, and gives a natural lse `[batch, h, R]`."""
    from flash_attn import flash_attn_func

    out, lse, _ = flash_attn_func(
        query[None],
        key[None],
        value[None],
        softmax_scale=scale,
        causal=mask.is_causal,
        window_size=(-1, -1) if mask.window is None else (mask.window - 1, 0),
        softcap=softcap,
        return_attn_probs=True,
    )
    return AttentionState(out[0].float(), lse[0].T.float().contiguous())


def create_flashinfer() -> LibraryBackend:
    """The backend `flashinfer`."""
    widths = ((64, 64), (128, 128), (192, 128), (256, 256))
    return LibraryBackend(
        "flashinfer",
        "flashinfer",
        _flashinfer,
        lambda key, value: (key, value) in widths,
        "64 and 64, 128 and 128, 192 and 128, or 256 and 256",
    )


def create_flash_attn() -> LibraryBackend:
    """The backend `flash_attn`."""
    return LibraryBackend(
        "flash_attn",
        "flash_attn",
        _flash_attn,
        lambda key, value: key == value and key <= 256 and key % 8 == 0,
        "equal, a multiple of 8 and at most 256",
    )
