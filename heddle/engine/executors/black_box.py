"""What a driver writes down when ranks have failed: where they stood, and their last calls."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from heddle.config import folders
from heddle.config.engine import ResolvedConfig
from heddle.engine.executors.failure import Failure, describe_rank, first_cause
from heddle.faults.dump import create_dump, write_dump
from heddle.faults.page import Standing
from heddle.faults.standing import describe, members_of
from heddle.layout.mesh import Mesh

logger = logging.getLogger(__name__)


def with_standings(
    resolved: ResolvedConfig, failures: Sequence[Failure], standings: Sequence[Standing]
) -> list[Failure]:
    """Failures of which the cause says where all ranks stood; that is kept as a file too, which the
    log names.

    Args:
        resolved: what ran.
        failures: in order of arrival.
        standings: of the ranks that can be seen, in order of rank; none: nothing is added.
    """
    if not standings:
        return list(failures)
    labels = [describe_rank(resolved.parallel, n) for n in range(resolved.parallel.world_size)]
    cause = first_cause(failures)
    where = "\n".join(("where the ranks stood:", *describe(standings, labels)))
    _keep(resolved, labels, standings, f"{labels[cause.rank]}: {cause.text}")
    detail = "\n".join(filter(None, (cause.detail, where)))
    return [
        dataclasses.replace(failure, detail=detail) if failure is cause else failure
        for failure in failures
    ]


def _keep(
    resolved: ResolvedConfig, labels: Sequence[str], standings: Sequence[Standing], cause: str
) -> None:
    dump = create_dump(cause, labels, members_of(Mesh.of(resolved.parallel)), standings)
    rules = [rule for rule in resolved.faults if rule.kind == "driver"]
    try:
        path = write_dump(dump, folders.default_dump_dir(), rules)
    except (OSError, RuntimeError) as error:  # a full disk, or no home: they hide no failure
        logger.warning("what the ranks did last is not kept: %s", error)
        return
    logger.warning("what the ranks did last is kept; see it with: heddle doctor --dump %s", path)
