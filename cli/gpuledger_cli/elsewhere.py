"""Commands that `gpuledger --help` and completion list, and that `gpuledger.programs` runs.

Components must start without this package, so they cannot be commands of its `app`.
"""

from typing import Annotated

from cyclopts import Parameter

from gpuledger.programs import main


def run(*_: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]) -> int | None:
    """Run the component or command given on the command line; return its exit code."""
    return main()
