"""The consumer groups of the demo are its own: no deployment loses a partition to it.

The names of the join's transactions begin with its group, and so are the demo's own too.
"""

from typing import Final

PREFIX: Final = "gpuledger-demo-"
_OF_A_DEPLOYMENT: Final = "gpuledger-"


def own_group(group: str) -> str:
    """Return the name of the demo's group that does the work of a deployment's group."""
    return PREFIX + group.removeprefix(_OF_A_DEPLOYMENT)


def is_own(group: str) -> bool:
    """Return whether a group is a demo's."""
    return group.startswith(PREFIX)
