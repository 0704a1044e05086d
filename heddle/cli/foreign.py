"""Flags that users bring along from vLLM and that Heddle does not have.

A flag is ignored, with a warning, when leaving it out changes nothing that the user could observe
in a result; otherwise it is refused with a pointer to what to do instead.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFlag:
    """What becomes of a flag that is known elsewhere.

    Attributes:
        why: the reason, or what to use instead.
        refused: False only warns.
        takes_value: a word after it belongs to it.
    """

    why: str
    refused: bool = True
    takes_value: bool = True


def _ignored(why: str, *, takes_value: bool = False) -> ForeignFlag:
    return ForeignFlag(why=why, refused=False, takes_value=takes_value)


_NO_SERVER = "it belongs to heddle serve"
_NO_GPU_POOL = "set the pool with --kv-cache-memory-bytes"

FOREIGN_FLAGS: dict[str, ForeignFlag] = {
    "--disable-custom-all-reduce": _ignored("collectives have one implementation"),
    "--disable-log-requests": _ignored("prompts are never logged"),
    "--disable-log-stats": _ignored("no periodic statistics are logged"),
    "--enable-chunked-prefill": _ignored("prompts are always prefilled in chunks"),
    "--max-seq-len-to-capture": _ignored("no step is captured", takes_value=True),
    "--swap-space": _ignored("preempted requests are recomputed", takes_value=True),
    "--use-v2-block-manager": _ignored("there is one block manager"),
    "--allowed-origins": ForeignFlag(why=_NO_SERVER),
    "--api-key": ForeignFlag(why=_NO_SERVER),
    "--cpu-offload-gb": ForeignFlag(why="weights stay in the memory of their rank"),
    "--data-parallel-backend": ForeignFlag(why="run one engine per replica"),
    "--device": ForeignFlag(why="the device follows from the installed torch"),
    "--disable-sliding-window": ForeignFlag(why="set --max-model-len to at most the window"),
    "--gpu-memory-utilization": ForeignFlag(why=_NO_GPU_POOL),
    "--host": ForeignFlag(why=_NO_SERVER),
    "--kv-transfer-config": ForeignFlag(why="KV stays in the engine that computed it"),
    "--load-format": ForeignFlag(why="the format follows from the files"),
    "--no-enable-chunked-prefill": ForeignFlag(why="raise --max-num-batched-tokens instead"),
    "--port": ForeignFlag(why=_NO_SERVER),
    "--served-model-name": ForeignFlag(why=_NO_SERVER),
    "--tokenizer": ForeignFlag(why="the tokenizer is read from the model's folder"),
    "--trust-remote-code": ForeignFlag(why="code from a model repository is never run"),
}
