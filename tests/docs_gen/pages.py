"""The list of generated pages, and the function that writes them all.

Some pages are generated only in part, so the present page is read first.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from gpuledger.errors import UserError
from tests.docs_gen.agent_metrics_page import agent_metrics_page
from tests.docs_gen.agent_page import agent_page
from tests.docs_gen.chart_values_page import chart_values_page
from tests.docs_gen.cli_page import cli_page
from tests.docs_gen.dcgm_exporter_page import dcgm_exporter_page
from tests.docs_gen.limits_page import limits_page
from tests.docs_gen.metrics_page import metrics_page
from tests.docs_gen.permissions_page import permissions_page
from tests.docs_gen.reasons_page import dead_letter_reasons_page
from tests.docs_gen.series_page import alerts_page, series_page
from tests.docs_gen.settings_page import settings_page
from tests.docs_gen.tables_page import tables_page
from tests.docs_gen.topics_page import topics_page
from tests.docs_gen.xids_page import xids_page

IN_PART: Final[Mapping[str, Callable[[str], str]]] = {
    "reference/agent.md": agent_page,
    "reference/alerts.md": alerts_page,
    "reference/dcgm-exporter.md": dcgm_exporter_page,
    "reference/series.md": series_page,
    "reference/tables.md": tables_page,
    "reference/topics.md": topics_page,
}
"""By page, a function from the present page to the page with a new table."""
WHOLE: Final[Mapping[str, Callable[[], str]]] = {
    "reference/agent-metrics.md": agent_metrics_page,
    "reference/chart-values.md": chart_values_page,
    "reference/cli.md": cli_page,
    "reference/dead-letter-reasons.md": dead_letter_reasons_page,
    "reference/limits.md": limits_page,
    "reference/metrics.md": metrics_page,
    "reference/permissions.md": permissions_page,
    "reference/settings.md": settings_page,
    "reference/xids.md": xids_page,
}
PAGES: Final = (*IN_PART, *WHOLE)
"""All generated pages, by their paths in docs/."""


def make_page(directory: Path, name: str) -> str:
    """Return the content of a page; raises `UserError`, which names the page and the problem."""
    path = directory / name
    try:
        if name in IN_PART:
            return IN_PART[name](path.read_text(encoding="utf-8"))
        return WHOLE[name]()
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def write_pages(directory: Path) -> None:
    """Write all pages, or none if one cannot be made; raises `UserError`."""
    # All pages are made before the first is written, so that an error changes no page.
    made = {directory / name: make_page(directory, name) for name in PAGES}
    for path, text in made.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error
