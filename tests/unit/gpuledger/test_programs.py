"""The console scripts: what they say where their extra is not installed."""

import subprocess
import sys

import pytest


def run_without(script: str, module: str) -> subprocess.CompletedProcess[str]:
    """Run a script's function as if a module were not installed."""
    lines = (
        "import sys",
        f"sys.modules[{module!r}] = None",
        f"from gpuledger.programs import {script}",
        "sys.argv[1:] = ['--version']",
        f"sys.exit({script}())",
    )
    return subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("script", "module", "said"),
    [
        (
            "run_command",
            "cyclopts",
            "gpuledger: the module cyclopts is not installed: install gpuledger[demo]",
        ),
        (
            "run_agent",
            "pynvml",
            "gpuledger-agent: the module pynvml is not installed: install gpuledger[agent]",
        ),
        (
            "run_podwatch",
            "aiohttp",
            "gpuledger-podwatch: the module aiohttp is not installed: install gpuledger[enricher]",
        ),
        (
            "run_join",
            "msgspec",
            "gpuledger-join: the module msgspec is not installed: install gpuledger[enricher]",
        ),
        (
            "run_sink",
            "msgspec",
            "gpuledger-sink: the module msgspec is not installed: install gpuledger[sinks]",
        ),
        (
            "run_reports",
            "duckdb",
            "gpuledger-reports: the module duckdb is not installed: install gpuledger[reports]",
        ),
    ],
)
def test_a_program_whose_extra_is_not_installed_names_it_in_one_line(
    script: str, module: str, said: str
) -> None:
    done = run_without(script, module)

    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{said}\n")


def test_a_module_of_ours_that_is_missing_is_a_mistake_of_ours() -> None:
    done = run_without("run_command", "gpuledger_cli.command")

    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr
