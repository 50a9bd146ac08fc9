"""SIGTERM is heeded from a deployable's first instruction on: asked of real processes."""

import subprocess
import sys

import pytest

DEPLOYABLES = ("agent", "enricher.podwatch", "enricher.join", "sinks")
# Raises the signal in the process itself, just as the first of what takes long is imported.
SIGNALLED = """
import os, runpy, signal, sys

class Signals:
    def find_spec(self, name, path=None, target=None):
        if name == {first!r}:
            os.kill(os.getpid(), signal.SIGTERM)
        return None

sys.meta_path.insert(0, Signals())
{start}
"""
STARTS = {
    "script": "from {module}.__main__ import main; sys.exit(main())",
    "module": "runpy.run_module({module!r}, run_name='__main__', alter_sys=True)",
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("module", DEPLOYABLES)
def test_sigterm_before_the_work_ends_with_zero(module: str, start: str) -> None:
    begun = STARTS[start].format(module=module)
    code = SIGNALLED.format(first=f"{module}.command", start=begun)
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, timeout=60
    )

    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("module", DEPLOYABLES)
def test_nothing_but_our_own_empty_packages_is_imported_before_sigterm_is_heeded(
    module: str,
) -> None:
    code = (
        f"import os, signal, sys; before = {{*sys.modules}}; import {module}.__main__;"
        " print(*({*sys.modules} - before))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )

    packages = {module.partition(".")[0], module, "gpuledger"}
    assert {*ended.stdout.split()} == {*packages, f"{module}.__main__", "gpuledger.early"}
