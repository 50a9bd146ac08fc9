"""What stands in the demo's tables: the same words below them and in `--help`.

Imports nothing else of the demo, as the help is shown without loading it.
"""

from collections.abc import Mapping
from typing import Final

LIVE_COLUMNS: Final = {
    "SM %": "share of the last tick in which its kernels ran",
    "Watts": "its part of what the GPU draws",
    "Method": "how its part is known: exclusive is measured, others say by what it is split",
}
LIVE_ROWS: Final = {
    "(idle) POD": "what POD holds and nobody uses",
    "(host)": "work of no pod",
    "(unattributed)": "work of nobody who can be seen",
}
"""The rows that are no pod's use."""
SUMMARY_COLUMNS: Final = {
    "GPU s": "seconds in which its kernels ran, as booked",
    "true": "the same as the scenario played it",
    "unused": "seconds in which a GPU that it holds ran no kernel",
    "GiB h": "device memory that it held, times hours",
    "kJ": "its energy",
}


def as_facts(meanings: Mapping[str, str]) -> list[str]:
    """Return a phrase for each name."""
    return [f"{name}: {meaning}" for name, meaning in meanings.items()]


def as_help() -> str:
    """Return both tables' names with their meanings, as Markdown."""
    while_it_runs = [*as_facts(LIVE_COLUMNS), *as_facts(LIVE_ROWS)]
    return "\n".join(
        (
            "The table while it runs:\n",
            *(f"- {fact}" for fact in while_it_runs),
            "\nThe table at the end:\n",
            *(f"- {fact}" for fact in as_facts(SUMMARY_COLUMNS)),
        )
    )
