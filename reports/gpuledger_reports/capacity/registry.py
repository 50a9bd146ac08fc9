"""All capacity reports by name, in the order of the command's help."""

from collections.abc import Mapping
from typing import Final

from gpuledger_reports.capacity import (
    faults,
    fleet,
    fragmentation,
    outlook,
    queue,
    rightsizing,
    waste,
)
from gpuledger_reports.capacity.report import Report
from gpuledger_reports.capacity.summary import summary_of

_REPORTS: Final = (
    fleet.REPORT,
    waste.REPORT,
    rightsizing.REPORT,
    fragmentation.REPORT,
    queue.REPORT,
    outlook.REPORT,
    faults.REPORT,
)
REPORTS: Final[Mapping[str, Report]] = {
    report.name: report for report in (*_REPORTS, summary_of(_REPORTS))
}
