"""What a deployable does before it imports anything: SIGTERM counts from its first instruction on.

Nothing here may import what takes time. The interpreter's own start, before the first line of any
module of ours, cannot be covered from Python.
"""

import os
import signal


def end_on_sigterm() -> None:
    """Make SIGTERM end the process at once with exit code 0, until the work takes it over.

    For a program's first line: nothing has begun that would have to be cleaned up. As the first
    process of a container it would otherwise not even end, as Linux spares that from SIGTERM.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
