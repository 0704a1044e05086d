"""One profile for every law, one thread for every rank.

Law tests draw the same examples on every machine, so that a red run can be repeated; thread ranks
share the cores, so each may use one thread only. Settings from the environment (`HEDDLE_*`) must
not leak into the suite.
"""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

from heddle.config import folders

# Read when torch is first imported, which happens after this file in every test process and in its
# children.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Kernels for a GPU are tried without one; triton reads this when transformers or a test imports it.
os.environ.setdefault("TRITON_INTERPRET", "1")
for name in [name for name in os.environ if name.startswith("HEDDLE_")]:
    del os.environ[name]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a shell; tests that interrupt, and their children, need it back.
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "laws",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("laws")


@pytest.fixture(scope="session", autouse=True)
def dumps_of_tests_go_elsewhere(tmp_path_factory):
    """Ranks fail here on purpose; what they did last is nothing for the user's folder."""
    folder = tmp_path_factory.mktemp("dumps")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "default_dump_dir", lambda: folder)
        yield
