"""What every deployable tells of its checks."""

from typing import Final

from prometheus_client import Gauge

CHECK_OK: Final = Gauge(
    "gpuledger_check_ok",
    "1 while a check of /readyz holds, 0 while it fails; only severity `critical` makes unready.",
    ["check", "severity"],
)
