"""What a model is made of, what a layout asks for, and which of these do not go together.

A *kind* is a way in which some layer of a model meets its past; a model has one or more. A
*feature* is an axis or an exchange. `conflict` is the truth about each pair: rules refuse by it,
`docs/kinds.md` prints it, and tests run every pair that it allows.

A pair may also be legal and leave the kind's own layers alone (`no_effect`): a recurrent layer
keeps a state and exchanges nothing, while the attention layers beside it do. Or no model is known
that has both (`no_model`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from heddle.config.model import ModelConfig
from heddle.config.parallel import ParallelConfig

AXES = ("tp", "pcp", "dcp", "pp", "dp", "ep")
"""`ep`: whole experts are dealt out."""
RETURNS = ("ag_rs", "ag_ar", "a2a", "a2a_fine")
"""Ways back for partial results."""
REPLICATED_QUERIES = "a2a+Wq"
CONTEXTS = ("gather_q", "pass_q", "gather_kv", "ring_kv")
"""Ways in which rows of a prompt meet cached context."""
LANES = "lanes"
EXCHANGES = (*RETURNS, REPLICATED_QUERIES, *CONTEXTS, LANES)
FEATURES = (*AXES, *EXCHANGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind."""

    name: str
    meaning: str
    example: str
    """A model that has it; empty where only the engine knows the kind."""


KINDS: tuple[Kind, ...] = (
    Kind(name="full GQA", meaning="a query sees every key before it", example="Llama, Qwen"),
    Kind(name="MLA", meaning="all heads share one latent row", example="DeepSeek-V3, Kimi-K2"),
    Kind(name="sliding window", meaning="the last w keys", example="Gemma, gpt-oss, Mistral"),
    Kind(name="chunked-local", meaning="keys of the query's own chunk", example="Llama 4"),
    Kind(name="first tokens + window", meaning="the first keys and the last w", example=""),
    Kind(name="learned sinks", meaning="a logit per head joins the softmax", example="gpt-oss"),
    Kind(name="soft cap", meaning="scores are bent to a bound", example="Gemma 2"),
    Kind(name="gated delta", meaning="a matrix state, delta rule", example="Qwen3-Next"),
    Kind(name="Mamba-2", meaning="a matrix state, one decay per head", example="Bamba"),
    Kind(name="lightning", meaning="a matrix state, fixed decay", example="MiniMax"),
    Kind(name="sparse top-k", meaning="an indexer picks the keys", example="DeepSeek-V3.2, GLM-5"),
    Kind(name="MoE", meaning="a router picks feed-forward blocks", example="Mixtral, DeepSeek"),
    Kind(name="drafts", meaning="several rows of a sequence are verified", example="any"),
)
RECURRENT = {"gated_delta": "gated delta", "mamba2": "Mamba-2", "lightning": "lightning"}
"""`RecurrentConfig.method` -> kind."""

_QUERIES_TRAVEL = "keys are chosen over the whole context, so queries travel and keys never do"
_ONE_PART = "the keys that a rank holds of a choice are met as one part, not lane by lane"
_NO_MODEL = "no architecture that is read here has both"
_CONFLICTS: dict[tuple[str, str], str] = {
    ("sparse top-k", "pass_q"): "each rank needs all queries to rank the keys it holds",
    ("sparse top-k", "gather_kv"): _QUERIES_TRAVEL,
    ("sparse top-k", "ring_kv"): _QUERIES_TRAVEL,
    ("sparse top-k", LANES): _ONE_PART,
}
_WITHOUT_EXPERTS = ("first tokens + window", "soft cap", "Mamba-2")
_STATE_IS_WHOLE = "a state has no positions to deal out: TP cuts it by heads, and PCP scans it"


def conflict(kind: str, feature: str) -> str:
    """Why a kind and a feature do not go together; empty where they do.

    Args:
        kind: name of one of `KINDS`.
        feature: one of `FEATURES`.
    Raises:
        ValueError: either is not known.
    Example:
        >>> conflict("soft cap", "pass_q"), conflict("sparse top-k", "pass_q")
        ('', 'each rank needs all queries to rank the keys it holds')
    """
    _check(kind, feature)
    return _CONFLICTS.get((kind, feature), "")


def no_model(kind: str, feature: str) -> str:
    """Why a legal pair never meets in a model; empty where it may.

    Raises:
        ValueError: kind or feature is not known.
    """
    _check(kind, feature)
    return _NO_MODEL if feature == "ep" and kind in _WITHOUT_EXPERTS else ""


def no_effect(kind: str, feature: str) -> str:
    """Why a legal feature leaves the layers of a kind as they are; empty where it does not.

    Raises:
        ValueError: kind or feature is not known.
    """
    _check(kind, feature)
    is_idle = kind in RECURRENT.values() and feature in ("dcp", *EXCHANGES)
    return _STATE_IS_WHOLE if is_idle else ""


def _check(kind: str, feature: str) -> None:
    names = [known.name for known in KINDS]
    if kind not in names:
        raise ValueError(f"kind={kind!r} is not known; known: {', '.join(names)}")
    if feature not in FEATURES:
        raise ValueError(f"feature={feature!r} is not known; known: {', '.join(FEATURES)}")


def kinds_of(model: ModelConfig) -> tuple[str, ...]:
    """The kinds of a model, in the order of `KINDS`; drafts are not the model's."""
    found = set(_layer_kinds(model))
    found |= {"learned sinks"} if model.has_sinks else set()
    found |= {"soft cap"} if model.attention_softcap > 0 else set()
    found |= {"MoE"} if model.moe is not None else set()
    return tuple(kind.name for kind in KINDS if kind.name in found)


def _layer_kinds(model: ModelConfig) -> Iterator[str]:
    for kind in map(model.kind_of, range(model.num_layers)):
        rule = kind.visibility
        if kind.mixer == "recurrent":
            assert model.recurrent is not None, "the model has recurrent layers"
            yield RECURRENT[model.recurrent.method]
        elif rule.kind == "chunk":
            yield "chunked-local"
        elif rule.kind == "window":
            yield "first tokens + window" if rule.num_first else "sliding window"
        elif model.is_mla:
            yield "MLA" if model.sparse is None else "sparse top-k"
        else:
            yield "full GQA"


def features_of(parallel: ParallelConfig) -> tuple[str, ...]:
    """The features that a layout asks for by name, in the order of `FEATURES`.

    Values may be of any type: whether they are legal is for the rules to say.
    """
    exchanges = (parallel.dcp_comm_backend, parallel.cp_context_exchange)
    found = {
        "tp": parallel.tensor_parallel_size != 1,
        "pcp": parallel.prefill_context_parallel_size != 1,
        "dcp": parallel.decode_context_parallel_size != 1,
        "pp": parallel.pipeline_parallel_size != 1,
        "dp": parallel.data_parallel_size != 1,
        "ep": parallel.enable_expert_parallel,
        REPLICATED_QUERIES: parallel.dcp_q_replicate,
        LANES: parallel.cp_lanes is not None,
        **{name: name in exchanges for name in (*RETURNS, *CONTEXTS)},
    }
    return tuple(feature for feature in FEATURES if found[feature])
