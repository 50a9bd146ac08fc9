"""Calls of a storage that may be slow or away, in threads for which no end of the process waits."""

from gpuledger.threads import in_daemon_thread

__all__ = ["in_daemon_thread"]
