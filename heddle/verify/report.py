"""A certificate as data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from heddle.verify.certify import Certificate, Finding
from heddle.verify.trials import Trial


def certificate_document(certificate: Certificate) -> dict[str, Any]:
    """The document that `heddle verify --json` prints."""
    error = certificate.bound.narrow_error
    return {
        "ok": certificate.ok,
        "dtype": certificate.dtype,
        "kv_cache_dtype": certificate.kv_cache_dtype,
        "tolerance": certificate.bound.tolerance,
        "tie_gap": certificate.bound.tie_gap,
        "one_rank_error": None if error is None else asdict(error),
        "prompt_lens": list(certificate.prompt_lens),
        "num_tokens": certificate.num_tokens,
        "layouts": [_layout(finding) for finding in certificate.findings],
    }


def layout_document(trial: Trial) -> dict[str, Any]:
    """A layout with its strategy: the keys that lead every row."""
    parallel = trial.parallel
    return {
        "tp": parallel.tensor_parallel_size,
        "pcp": parallel.prefill_context_parallel_size,
        "dcp": parallel.decode_context_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "dp": parallel.data_parallel_size,
        "interleave": parallel.kv_interleave_size,
        "block_size": trial.block_size,
        "exchange": parallel.dcp_comm_backend,
        "context_exchange": parallel.cp_context_exchange,
    }


def _layout(finding: Finding) -> dict[str, Any]:
    comparison = finding.comparison
    first = comparison.first_difference
    return layout_document(finding.trial) | {
        "max_abs_logit_diff": comparison.max_abs_logit_diff,
        "tokens_equal": comparison.tokens_equal,
        "near_ties": comparison.near_ties,
        "steps": comparison.num_steps,
        "first_difference": None if first is None else asdict(first),
        "ok": comparison.ok,
    }
