"""The layout against one rank, on fixed prompts, before anybody is served.

A wrong rank, a wrong build or a damaged copy of the weights shows here, not in somebody's text. One
rank is loaded beside the layout for as long as the check takes, so memory has to have room for one
more copy of the weights.
"""

from __future__ import annotations

import dataclasses

import psutil

from heddle.config.engine import EngineConfig
from heddle.engine.llm import LLM
from heddle.errors import NumericsError
from heddle.server.config import SelfCheck
from heddle.server.memory_plan import predicted_bytes
from heddle.verify.certify import golden_config, resolved_dtypes
from heddle.verify.oracles import RELATIVE_TOLERANCE, compare, wide_bound
from heddle.verify.runs import ask_prompts, run_prompts

NUM_TOKENS = 4
LONG_PROMPT = 96
MEMORY_FACTOR = 1.5
"""Free memory that one more copy of the weights needs, in sizes of all ranks' weights."""


def why_skipped(config: EngineConfig, llm: LLM, wanted: SelfCheck) -> str:
    """Why no check is made; empty: it is made.

    Args:
        config: of the engine.
        llm: loaded.
        wanted: by the setting.
    """
    plan = llm.plan
    if wanted == "off":
        return "it is switched off"
    if plan.parallel.world_size == 1:
        return "one rank has nothing to differ from"
    dtype, kv_dtype = resolved_dtypes(config)
    if dtype != kv_dtype or dtype not in RELATIVE_TOLERANCE:
        return f"{dtype} with a {kv_dtype} cache has no bound of its own; see heddle verify"
    if wanted == "on":
        return ""
    weights = sum(parts["weights"] for parts in predicted_bytes(plan).values())
    free = psutil.virtual_memory().available
    if free < MEMORY_FACTOR * weights:
        return f"{free >> 20} MiB are free, too few for one more copy of the weights"
    return ""


def check_layout(config: EngineConfig, llm: LLM) -> float:
    """Compare the logits of a loaded layout with those of one rank.

    Args:
        config: that `llm` was made from.
        llm: idle.
    Returns:
        The largest difference.
    Raises:
        NumericsError: it is above what rounding explains, or a token differs.
    """
    plan = llm.plan
    usable = llm.driver.replicas[0].cache.usable_tokens
    longest = max(min(LONG_PROMPT, plan.scheduler.max_model_len, usable // 2) - NUM_TOKENS, 1)
    lengths = {longest, min(2 * plan.parallel.prefill_context_parallel_size + 1, longest), 1}
    vocab_size = plan.model.vocab_size
    prompts = [[(7 * i + 3 * length) % vocab_size for i in range(length)] for length in lengths]
    one_rank = golden_config(config, [len(prompt) for prompt in prompts])
    num_blocks = sum(-(-(n + NUM_TOKENS) // plan.cache.block_size) for n in lengths) + 1
    one_rank = dataclasses.replace(
        one_rank,
        max_model_len=plan.scheduler.max_model_len,
        cache=dataclasses.replace(one_rank.cache, num_blocks_override=num_blocks),
    )
    golden = run_prompts(one_rank, prompts, num_tokens=NUM_TOKENS)
    found = ask_prompts(
        llm, prompts, num_tokens=NUM_TOKENS, teachers=[trace.token_ids for trace in golden]
    )
    llm.reset_prefix_cache()
    comparison = compare(golden, found, wide_bound(golden, plan.dtype))
    if not comparison.ok:
        raise NumericsError(
            f"the layout does not give one rank's numbers: logits differ by "
            f"{comparison.max_abs_logit_diff:.2g} on fixed prompts; `heddle verify` says where"
        )
    return comparison.max_abs_logit_diff
