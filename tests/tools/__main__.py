"""Get the real parts that tests/real talks to: `python -m tests.tools [NAME...]`.

A part that cannot be had is one loud line. That is an error where CI=true; on a person's machine
the tests that need it are left out, which is for pytest to say again.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING

from tests.tools import catalogue, report
from tests.tools.errors import MissingToolError

if TYPE_CHECKING:
    from collections.abc import Sequence

USAGE_ERROR = 2


def main(
    arguments: Sequence[str],
    *,
    known: Sequence[catalogue.Tool] = catalogue.TOOLS,
    extended: Sequence[catalogue.Tool] = catalogue.EXTENDED_TOOLS,
) -> int:
    """Run the command and give its exit code."""
    options = _parse(arguments)
    try:
        named = [catalogue.named(name, (*known, *extended)) for name in options.names]
    except MissingToolError as error:
        sys.stderr.write(f"{error}\n")
        return USAGE_ERROR
    tools = named or list(known)
    started_seconds = time.monotonic()
    find_only = options.list or options.check
    missing = [tool.name for tool in tools if not _provide(tool, find_only=find_only)]
    if not find_only:
        seconds = time.monotonic() - started_seconds
        report.print_line(
            f"{len(tools) - len(missing)} of {len(tools)} real parts in {seconds:.1f} s"
        )
    must_have_all = options.check or os.environ.get("CI") == "true"
    return 1 if missing and must_have_all and not options.list else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.tools", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="only these (default: those of make test)"
    )
    parser.add_argument("--list", action="store_true", help="say what is there and where")
    parser.add_argument(
        "--check", action="store_true", help="as --list, with exit code 1 when a part is missing"
    )
    return parser.parse_args(arguments)


def _provide(tool: catalogue.Tool, *, find_only: bool) -> bool:
    address = catalogue.given(tool)
    if address and not find_only:
        report.print_line(f"{tool.name}: {tool.given_by}={address}, nothing to fetch")
        return True
    try:
        path = tool.find() if find_only else tool.provide()
    except MissingToolError as error:
        report.print_line(f"{report.LOUD} {tool.name} {tool.version} CANNOT BE HAD: {error.reason}")
        return False
    report.print_line(f"{tool.name} {tool.version}: {path}")
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
