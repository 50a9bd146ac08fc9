"""Signals are handled from a program's first instruction on, tested with real processes."""

import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpuledger.programs import COMPONENTS

SUBCOMMANDS = {package: name for name, (package, _) in COMPONENTS.items()}
PACKAGES = tuple(SUBCOMMANDS)
INTERRUPTED = 130
# Raises the signal in the process itself, just when the first slow module is imported.
SIGNALLED = """
import os, runpy, signal, sys

class Signals:
    def find_spec(self, name, path=None, target=None):
        if name == {first!r}:
            os.kill(os.getpid(), {number})
        return None

sys.meta_path.insert(0, Signals())
{start}
"""
STARTS = {
    "script": "sys.argv[1:1] = {given}; from gpuledger.programs import main; sys.exit(main())",
    "module": "runpy.run_module({module!r}, run_name='__main__', alter_sys=True)",
}


def run_by(module: str) -> str:
    """Return the module that a component's `__main__` imports once it handles signals."""
    spec = find_spec(f"{module}.__main__")
    assert spec
    assert spec.origin
    main = Path(spec.origin).read_text()
    (found,) = re.findall(r"^    from (\S+) import main as run\b", main, flags=re.MULTILINE)
    return str(found)


def signalled(
    number: signal.Signals, *, module: str, start: str, at: str, argv: tuple[str, ...] = ()
) -> tuple[int, bytes]:
    """Return exit code and standard error of a program that is signalled while it imports `at`."""
    given = [SUBCOMMANDS[module]] if module in SUBCOMMANDS else []
    begun = STARTS[start].format(module=module, given=given)
    code = SIGNALLED.format(first=at, number=int(number), start=begun)
    ended = subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, check=False, timeout=60
    )
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("module", PACKAGES)
def test_a_signal_before_the_work_ends_a_component_with_zero(
    module: str, start: str, number: signal.Signals
) -> None:
    assert signalled(number, module=module, start=start, at=run_by(module)) == (0, b"")


@pytest.mark.parametrize("begin", ["end_on_signals()", "end_on_interrupt(130)"])
@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_a_closed_standard_stream_is_replaced_by_the_null_device(closed: str, begin: str) -> None:
    """Otherwise the next file to be opened would become that stream."""
    code = (
        "import os, sys\n"
        "from gpuledger.programs import *\n"
        f"{begin}\n"
        "taken = os.open('/', os.O_RDONLY)\n"
        "print('x', file=sys.stdout), print('x', file=sys.stderr)\n"
        "end_process(7 if taken > 2 else 1)"
    )
    started = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code]
    assert subprocess.run(started, check=False, timeout=60).returncode == 7


@pytest.mark.parametrize("module", PACKAGES)
def test_a_component_ends_with_its_exit_code_whatever_its_threads_are_doing(module: str) -> None:
    """Interpreter shutdown, shown by `atexit`, would change that code."""
    code = (
        f"import atexit, {module}.__main__, {run_by(module)} as command\n"
        "atexit.register(print, 'the interpreter ended')\n"
        "command.main = lambda: print('said') or 3\n"
        f"{module}.__main__.main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )

    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "said\n", "")


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(
    "at", ["gpuledger_cli.command", "cyclopts", "gpuledger_cli.demo.demo_command", "asyncio"]
)
def test_ctrl_c_before_the_work_ends_the_command_quietly_with_130(at: str, start: str) -> None:
    ended = signalled(signal.SIGINT, module="gpuledger_cli", start=start, at=at, argv=("demo",))
    assert ended == (INTERRUPTED, b"")


@pytest.mark.parametrize("module", [*PACKAGES, "gpuledger_cli"])
def test_only_our_own_empty_packages_are_imported_before_signals_are_handled(
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
    assert {*ended.stdout.split()} == {*packages, f"{module}.__main__", "gpuledger.programs"}
