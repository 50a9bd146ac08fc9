"""`gpuledger`: which program the first argument starts, and the error if its extra is missing."""

import subprocess
import sys
from pathlib import Path

import pytest

from gpuledger.programs import COMPONENTS


def gpuledger(*argv: str, without: str = "") -> subprocess.CompletedProcess[str]:
    """Run the console script as if a module were not installed."""
    code = (
        f"import sys; sys.modules[{without!r}] = None; sys.argv[0] = 'gpuledger'\n"
        "from gpuledger.programs import main; sys.exit(main())"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *argv],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("argv", "program", "module", "extra"),
    [
        ("--version", "gpuledger", "cyclopts", "demo"),
        ("agent --version", "gpuledger agent", "pynvml", "agent"),
        ("podwatch", "gpuledger podwatch", "aiohttp", "enricher"),
        ("join", "gpuledger join", "msgspec", "enricher"),
        ("sink store", "gpuledger sink", "msgspec", "sinks"),
        ("reports", "gpuledger reports", "duckdb", "reports"),
        ("config explain sink", "gpuledger config", "msgspec", "sinks"),
    ],
)
def test_a_program_whose_extra_is_not_installed_names_the_command_that_installs_it(
    argv: str, program: str, module: str, extra: str
) -> None:
    done = gpuledger(*argv.split(), without=module)

    assert (done.returncode, done.stdout) == (2, "")
    lock = f"requirements/{extra}.lock"
    assert done.stderr == (
        f"{program}: the module {module} is not installed; run `{sys.executable} -m pip install -r"
        f" {lock}` in a checkout of gpuledger\n"
    )
    assert (Path(__file__).parents[3] / lock).is_file()


def test_a_missing_module_of_ours_is_an_internal_error() -> None:
    done = gpuledger("--version", without="gpuledger_cli.command")

    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_does_not_need_the_libraries_of_the_interactive_commands(
    component: str,
) -> None:
    done = gpuledger(component, "--version", without="cyclopts")

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"gpuledger {component} ")


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_help_of_a_component_is_short_and_names_the_command_that_explains_the_rest(
    component: str,
) -> None:
    done = gpuledger("help", component, without="cyclopts")
    usage, *_, last = done.stdout.splitlines()

    assert (done.returncode, done.stderr) == (0, "")
    assert usage.startswith(f"Usage: gpuledger {component} ")
    assert "\nExamples:\n" in done.stdout
    assert done.stdout.count("\n      GPULEDGER_") == 10
    assert "\nExit codes:\n  0  " in done.stdout
    assert last.endswith(f"gpuledger config explain {component}")


def test_the_help_of_a_sink_names_the_command_that_explains_its_settings() -> None:
    *_, everything, section = gpuledger("help", "sink", "store").stdout.splitlines()

    assert everything.endswith(" settings: gpuledger config explain sink")
    assert section == "Settings of store only: gpuledger config explain sink store"


def test_help_for_a_group_of_commands_prints_its_help_option() -> None:
    assert gpuledger("help", "topics").stdout == gpuledger("topics", "--help").stdout
    assert gpuledger("help").stdout == gpuledger("--help").stdout


def test_explaining_settings_to_a_reader_that_closes_the_pipe_leaves_no_traceback() -> None:
    code = "import sys; from gpuledger.programs import main; sys.exit(main())"
    piped = f'"$0" -c "{code}" config explain agent | head -n 1; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", piped, sys.executable],  # noqa: S607  # the shell that the tests have
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.stdout.count("\n"), done.stderr) == (1, "")
