"""A process that ends while deltalake runs in its threads."""

import subprocess
import sys
from pathlib import Path

# A store sink that is stopped waits for no call: one may be in progress.
ENDS_WITHIN_A_CALL = """
import sys, threading
from itertools import count
from gpuledger.programs import end_process
from gpuledger.store.schema import ENTRIES
from gpuledger_sinks.store.table import StreamTable

begun = threading.Event()

def keep_loading():
    for number in count():
        begun.set()
        StreamTable(ENTRIES, store_uri=f"{sys.argv[1]}/{number}").load(["a"])

threading.Thread(target=keep_loading, daemon=True).start()
begun.wait()
end_process(3)
"""


def test_a_process_that_ends_while_a_table_is_loaded_has_its_own_exit_code(
    tmp_path: Path,
) -> None:
    """With Python's own end it was killed by SIGSEGV every time."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_WITHIN_A_CALL, str(tmp_path)],
        capture_output=True,
        check=False,
        timeout=60,
    )

    assert (ended.returncode, ended.stdout, ended.stderr) == (3, b"", b"")
