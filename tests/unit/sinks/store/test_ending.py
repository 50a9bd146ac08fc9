"""The end of a process in whose threads deltalake is at work."""

import subprocess
import sys
from pathlib import Path

# A store sink that is told to end waits for no call: it may be in the midst of one.
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


def test_a_process_that_ends_while_a_table_is_loaded_ends_with_its_own_exit_code(
    tmp_path: Path,
) -> None:
    """By Python's own end it was killed by SIGSEGV each time."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_WITHIN_A_CALL, str(tmp_path)],
        capture_output=True,
        check=False,
        timeout=60,
    )

    assert (ended.returncode, ended.stdout, ended.stderr) == (3, b"", b"")
