"""How a driver reaches its ranks: in its own thread, in threads, in processes, or under a launcher.

All executors answer the same few calls (`Executor`), so the driver does not know which one it has.
"""

from heddle.engine.executors.base import Executor
from heddle.engine.executors.create import create_executor

__all__ = ["Executor", "create_executor"]
