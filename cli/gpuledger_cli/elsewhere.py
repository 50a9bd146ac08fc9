"""Commands that `gpuledger --help` and completion list, and that `gpuledger.programs` runs.

Components must start without this package, so they are no commands of its `app`.
"""

from typing import Annotated

from cyclopts import Parameter

from gpuledger.programs import main


def run(*_: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]) -> int | None:
    """Run the component or command that the command line names; return its exit code."""
    return main()
