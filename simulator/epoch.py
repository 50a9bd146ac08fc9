"""When a run's scenario starts: given, agreed through a file, or now.

Here lives the one number that the processes of a simulation must share.
"""

import os
import time
from pathlib import Path

from gpuledger.errors import UserError


def choose_epoch_ns(epoch_ns: int, *, file: Path | None = None) -> int:
    """Return the epoch: `epoch_ns` unless it is 0, else the one in `file`, else now.

    The first process that finds no file writes it, so that those that start later agree with it.
    Raises UserError where the file holds no epoch or cannot be written.
    """
    if epoch_ns:
        return epoch_ns
    now_ns = time.time_ns()
    if file is None:
        return now_ns
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        draft.write_text(f"{now_ns}\n")
        try:
            file.hardlink_to(draft)  # succeeds for one process alone, and with the whole content
        except FileExistsError:
            return int(file.read_text())
        finally:
            draft.unlink()
    except OSError as error:
        raise UserError(f"{file}: cannot keep the epoch: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{file}: no epoch in nanoseconds; delete it to begin anew") from error
    return now_ns
