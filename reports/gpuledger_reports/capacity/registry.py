"""All capacity reports, by name, in the order in which they are shown."""

from collections.abc import Mapping
from typing import Final

from gpuledger_reports.capacity import fleet, fragmentation, outlook
from gpuledger_reports.capacity.report import Report

REPORTS: Final[Mapping[str, Report]] = {
    report.name: report for report in (fleet.REPORT, fragmentation.REPORT, outlook.REPORT)
}
