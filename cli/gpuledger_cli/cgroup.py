"""`gpuledger cgroup`: shows how the agent reads a cgroup line.

Users of an unusual container runtime can check which container, pod and job the agent finds.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from gpuledger.errors import UserError
from gpuledger_agent.core.processes.table import Location
from gpuledger_agent.host.cgroup import locate
from gpuledger_cli.option_help import epilogue

app = App(
    name="cgroup",
    usage="gpuledger cgroup [OPTIONS] [PATH-OR-LINE...]",
    help_format="plaintext",
    help_epilogue=epilogue(
        examples={
            "A process of this machine": "gpuledger cgroup /proc/4711/cgroup",
            "All processes": "cat /proc/[0-9]*/cgroup | sort -u | gpuledger cgroup",
        },
        codes={2: "a file cannot be read"},
    ),
)


@app.default
def cgroup(
    *lines: Annotated[
        str,
        Parameter(
            name="PATH-OR-LINE",
            help="A file such as /proc/4711/cgroup, or a line of one; by default lines from"
            " standard input.",
            allow_leading_hyphen=False,
        ),
    ],
    format: Annotated[  # noqa: A002  # the option's name
        Literal["table", "json"], Parameter(help="table, or json: one object per line.")
    ] = "table",
) -> None:
    """Show the container, the pod and the job that cgroup lines belong to."""
    if not lines and sys.stdin.isatty():
        sys.stderr.write("gpuledger: reading cgroup lines from the terminal; Ctrl-D ends\n")
    # All arguments are read before anything is printed, so that only the error is printed if one
    # is invalid.
    locations: Iterable[Location] = map(locate, filter(str.strip, sys.stdin))
    if lines:
        locations = list(map(locate_argument, lines))
    try:
        for line in as_json(locations) if format == "json" else as_table(locations):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe; send what Python flushes at exit to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def locate_argument(text: str) -> Location:
    """Return the container, pod and job in a cgroup file or a line.

    Raises UserError if the file cannot be read.
    """
    if text.startswith("/proc/") or _is_file(text):
        try:
            return locate(Path(text).read_text(errors="replace"))
        except OSError as error:
            raise UserError(f"cannot read {text}: {error.strerror or error}") from error
    location = locate(text)
    if location.is_of_host and _seems_missing(text):
        raise UserError(f"cannot read {text}: No such file, and not a container's cgroup path")
    return location


def as_json(locations: Iterable[Location]) -> Iterator[str]:
    """Yield one JSON object for each line; missing parts are null."""
    for location in locations:
        yield json.dumps(
            {
                "line": location.line,
                "pod_uid": location.pod_uid,
                "container_id": location.container_id,
                "job_id": location.job_id,
            }
        )


def as_table(locations: Iterable[Location]) -> Iterator[str]:
    """Yield a row for each line, with the line last because it may be long."""
    row = "{:36}  {:64}  {:10}  {}".format  # the widths of a UID, a container id and Slurm's ids
    yield row("POD UID", "CONTAINER ID", "JOB", "LINE")
    for location in locations:
        yield row(
            location.pod_uid or "-",
            location.container_id or "-",
            location.job_id or "-",
            location.line or "-",
        )


def _is_file(text: str) -> bool:
    """Return whether the text is the path of a file; a cgroup path looks similar."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def _seems_missing(text: str) -> bool:
    """Return whether the text is likely to name a missing file, not a cgroup path of the host."""
    folder = Path(text).parent
    try:
        return ":" not in text and folder != Path("/") and folder.is_dir()
    except (OSError, ValueError):
        return False
