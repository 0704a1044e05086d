"""One page of memory per rank that says where it stands, and what it last said to the others.

The rank writes it with plain stores; whoever holds the descriptor reads it at any time: while the
rank is stopped, deep in a C call, or dead. So a page tells what no message can.

    0         where: life, step, phase, layer
    512       heartbeat: monotonic seconds, stored by a thread of its own
    1024      ring of the last calls, 64 bytes each: what was begun, and whether it has ended

Entries are numbered from 1 on, so the highest number is the last call. A reader may meet an entry
half-written only of a rank that still runs, and there a later look tells.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Sequence
from time import monotonic
from typing import get_args

import msgspec

from heddle.config.faults import RANK_PHASES
from heddle.layout.mesh import GROUP_KINDS
from heddle.step.traffic import CollectiveOp

_MARK = 0x4C44_4548
_HEADER = struct.Struct("<IIqqiBd")
_HEARTBEAT = struct.Struct("<d")
_HEARTBEAT_OFFSET = 512
_RING_OFFSET = 1024
MAX_DIMS = 6
_WORDS = struct.Struct(f"<BBBB{MAX_DIMS}I")
_CALL = struct.Struct(f"<QIIi{_WORDS.size}sdd")
_ENDED = struct.Struct("<d")
_CALL_BYTES = _CALL.size
_ENDED_OFFSET = _CALL_BYTES - _ENDED.size
_write_call, _write_ended = _CALL.pack_into, _ENDED.pack_into
_LOW_WORD = (1 << 32) - 1
"""Entries keep the low half of a step's number; its other half is in the header."""
NUM_CALLS = 2048
"""Calls that are kept: some steps of a deep model, hundreds of a small one."""
PAGE_BYTES = _RING_OFFSET + NUM_CALLS * _CALL_BYTES
_OPS: tuple[str, ...] = get_args(CollectiveOp)
_DTYPES = (
    *("float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8"),
    *("bool", "float8_e4m3fn", "float8_e5m2"),
)
_UNKNOWN = 255
_OP_NUMBERS = {name: number for number, name in enumerate(_OPS)}
_GROUP_NUMBERS: dict[str, int] = {name: number for number, name in enumerate(GROUP_KINDS)}
_DTYPE_NUMBERS = {name: number for number, name in enumerate(_DTYPES)}
_PHASE_NUMBERS = {name: number for number, name in enumerate(RANK_PHASES)}
_PADDING = (0,) * MAX_DIMS
_BEAT_SECONDS = 0.25


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One collective of one rank."""

    step: int
    number: int
    """From 0, within the step."""
    layer: int
    """-1: before the first layer, or behind the last."""
    op: str
    group: str
    dtype: str
    shape: tuple[int, ...]
    begun: float
    """Monotonic seconds; equal clocks on one host."""
    ended: float | None
    """None: it had not come back."""

    @property
    def words(self) -> str:
        """For people."""
        sizes = ", ".join(map(str, self.shape))
        return f"{self.op} over {self.group}, [{sizes}] {self.dtype}"


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What a page says, at one moment."""

    rank: int
    epoch: int
    step: int
    """-1: no step has begun."""
    phase: str
    """One of `RANK_PHASES`; `collective` while a call has not come back."""
    layer: int
    """Of the last call, or of the fault hook that was passed last; -1: outside of layers."""
    num_collectives: int
    """Begun in this step."""
    since: float
    """Monotonic time at which it came there; equal clocks on one host."""
    heartbeat_age: float
    """Seconds since the rank's Python last ran; large: it is stopped, dead or in a C call that
    keeps the interpreter's lock.
    """
    calls: tuple[Call, ...] = ()
    """The last ones, oldest first."""

    @property
    def open_call(self) -> Call | None:
        """The one that has not come back."""
        last = self.calls[-1] if self.calls else None
        return last if last is not None and last.ended is None else None

    @property
    def progress(self) -> tuple[int, int, int]:
        """Orders ranks by how far they are."""
        return self.epoch, self.step, self.num_collectives


def create_page() -> int:
    """A descriptor of a fresh page, without a name in any folder.

    Raises:
        OSError: the system gives none.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("heddle-page", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as nameless:
            descriptor = os.dup(nameless.fileno())
    try:
        os.ftruncate(descriptor, PAGE_BYTES)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def call_words(op: str, group: str, dtype: str, shape: Sequence[int]) -> bytes:
    """What a page keeps of a call, to be made once for all calls that look alike.

    Args:
        op: of the protocol, `heddle.comm.base`.
        group: kind of the group.
        dtype: by its name.
        shape: sizes; those behind the first `MAX_DIMS` are not kept.
    """
    sizes = (*shape[:MAX_DIMS], *_PADDING[len(shape) :])
    numbers = (
        _OP_NUMBERS.get(op, _UNKNOWN),
        _GROUP_NUMBERS.get(group, _UNKNOWN),
        _DTYPE_NUMBERS.get(dtype, _UNKNOWN),
    )
    return _WORDS.pack(*numbers, len(shape), *sizes)


class RankPage:
    """The writer's side."""

    def __init__(self, rank: int = 0, epoch: int = 0, descriptor: int | None = None) -> None:
        """Take a page.

        Args:
            rank: whose it is.
            epoch: life of the ranks.
            descriptor: of the page, this object's from now on; None: memory that only this process
                sees.
        """
        self._rank, self._epoch = rank, epoch
        self._memory: mmap.mmap | bytearray
        if descriptor is None:
            self._memory = bytearray(PAGE_BYTES)
        else:
            self._memory = mmap.mmap(descriptor, PAGE_BYTES)
            os.close(descriptor)
        self._num_calls = 0
        self._entry = _RING_OFFSET
        self.stand("import", -1)

    def stand(self, phase: str, step: int, layer: int = -1) -> None:
        """Say where the rank stands."""
        number, now = _PHASE_NUMBERS[phase], monotonic()
        _HEADER.pack_into(self._memory, 0, _MARK, self._rank, self._epoch, step, layer, number, now)

    def begin_call(self, step: int, number: int, layer: int, words: bytes) -> None:
        """Note a call that is about to be made; in one store, for a step has hundreds of them.

        Args:
            step: the one under way.
            number: of the call within the step.
            layer: that it belongs to; -1: none.
            words: what is called; see `call_words`.
        """
        self._entry = entry = _RING_OFFSET + self._num_calls % NUM_CALLS * _CALL_BYTES
        self._num_calls = count = self._num_calls + 1
        _write_call(
            self._memory, entry, count, step & _LOW_WORD, number, layer, words, monotonic(), 0.0
        )

    def end_call(self) -> None:
        """The call that was begun last has come back."""
        _write_ended(self._memory, self._entry + _ENDED_OFFSET, monotonic())

    def beat(self) -> None:
        """Show that Python runs."""
        _HEARTBEAT.pack_into(self._memory, _HEARTBEAT_OFFSET, monotonic())

    def standing(self) -> Standing | None:
        """What a reader would see."""
        return read_page(bytes(self._memory))


def start_heartbeat(page: RankPage) -> None:
    """Beat from now on, in a thread of its own, for as long as the process lives."""

    def beat() -> None:
        while True:
            page.beat()
            time.sleep(_BEAT_SECONDS)

    page.beat()
    threading.Thread(target=beat, name="heddle-heartbeat", daemon=True).start()


def look(descriptor: int) -> Standing | None:
    """Read a page through its descriptor, whatever its rank is doing; None: nobody writes it."""
    return read_page(os.pread(descriptor, PAGE_BYTES, 0))


def read_page(raw: bytes) -> Standing | None:
    """What the bytes of a page say; None: nobody has written it."""
    mark, rank, epoch, step, layer, phase, since = _HEADER.unpack_from(raw)
    if mark != _MARK:
        return None
    calls = _calls(raw, step)
    last = calls[-1] if calls and calls[-1].step == step else None
    (beat,) = _HEARTBEAT.unpack_from(raw, _HEARTBEAT_OFFSET)
    return Standing(
        rank=rank,
        epoch=epoch,
        step=step,
        phase="collective" if last and last.ended is None else _name(RANK_PHASES, phase),
        layer=max(layer, last.layer) if last else layer,
        num_collectives=last.number + 1 if last else 0,
        since=max(since, last.begun) if last else since,
        heartbeat_age=max(0.0, monotonic() - beat) if beat else 0.0,
        calls=calls,
    )


def _calls(raw: bytes, step: int) -> tuple[Call, ...]:
    """In the order in which they were begun; `step` is the newest."""
    ring = memoryview(raw)[_RING_OFFSET : _RING_OFFSET + NUM_CALLS * _CALL_BYTES]
    found = sorted(entry for entry in _CALL.iter_unpack(ring) if entry[0])
    return tuple(
        _call(step - ((step - low_word) & _LOW_WORD), *facts) for _, low_word, *facts in found
    )


def _call(step: int, number: int, layer: int, words: bytes, begun: float, ended: float) -> Call:
    op, group, dtype, num_dims, *sizes = _WORDS.unpack(words)
    return Call(
        step=step,
        number=number,
        layer=layer,
        op=_name(_OPS, op),
        group=_name(GROUP_KINDS, group),
        dtype=_name(_DTYPES, dtype),
        shape=tuple(sizes[: min(num_dims, MAX_DIMS)]),
        begun=begun,
        ended=ended or None,
    )


def _name(names: Sequence[str], number: int) -> str:
    return names[number] if number < len(names) else "unknown"
