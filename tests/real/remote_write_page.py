"""The queries of docs/guides/prometheus.md, and the alerts of docs/reference/series.md."""

from __future__ import annotations

import re
from typing import Final

from tests.unit.deployment.components import ROOT

PAGE: Final = (ROOT / "docs" / "guides" / "prometheus.md").read_text()
_SERIES: Final = (ROOT / "docs" / "reference" / "series.md").read_text()


def alerts() -> dict[str, str]:
    """Return the expressions of the page's alerts, by their subject."""
    listed = _SERIES.partition("<!-- alerts:begin -->")[2].partition("<!-- alerts:end -->")[0]
    return dict(re.findall(r"^- (.+?): `(.+)`$", listed, flags=re.MULTILINE))
