"""The Prometheus queries of docs/remote-write.md."""

from __future__ import annotations

import re
from typing import Final

from tests.unit.deployment.deployables import ROOT

PAGE: Final = (ROOT / "docs" / "remote-write.md").read_text()


def alerts() -> dict[str, str]:
    """Return the expressions of the page's alerts, by their subject."""
    table = PAGE.partition("<!-- alerts:begin -->")[2].partition("<!-- alerts:end -->")[0]
    rows = re.findall(r"^\| (.+?) \| `(.+)` \|$", table, flags=re.MULTILINE)
    return {what: expression.replace(r"\|", "|") for what, expression in rows}
