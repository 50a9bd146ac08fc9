"""The dashboard's queries, sent to Prometheus as Grafana sends them."""

from __future__ import annotations

import re
import urllib.parse
from dataclasses import dataclass
from statistics import mean
from typing import TYPE_CHECKING, Any

from tests.real.services import web
from tests.unit.deployment import dashboard

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.real.services.prometheus import PrometheusApi
    from tests.unit.deployment.dashboard import Target


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A series of a panel."""

    name: str
    """Its name in the legend; in a table its row, with the query's letter for the column."""
    labels: Mapping[str, str]
    values: Sequence[float]

    @property
    def mean(self) -> float:
        return mean(self.values)


class Grafana:
    """Sends the dashboard's queries."""

    def __init__(self, prometheus: PrometheusApi) -> None:
        self._url = prometheus.url

    def show(self, target: Target, seconds: Sequence[int]) -> list[Shown]:
        """Return a target's series over these seconds since the epoch.

        A panel of one instant is queried once for each of them, as often as it would be refreshed.
        """
        if not target.is_instant:
            ends = {"start": seconds[0], "end": seconds[-1], "step": 1}
            return list(_shown(target, self._query("query_range", query=target.query, **ends)))
        found: dict[str, Shown] = {}
        for second in seconds:
            for one in _shown(target, self._query("query", query=target.query, time=second)):
                before = found.get(one.name)
                values = [*before.values, *one.values] if before else one.values
                found[one.name] = Shown(name=one.name, labels=one.labels, values=values)
        return list(found.values())

    def values_of(self, variable: Mapping[str, Any]) -> set[str]:
        """Return the options of a dashboard variable."""
        written = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"])
        assert written, variable["definition"]
        requested = urllib.parse.urlencode({"match[]": dashboard.fill_in(written[1])})
        answer = web.fetch(f"{self._url}/api/v1/label/{written[2]}/values?{requested}")
        return set(answer.json()["data"])

    def _query(self, how: str, **requested: object) -> list[dict[str, Any]]:
        answer = web.fetch(f"{self._url}/api/v1/{how}?{urllib.parse.urlencode(requested)}").json()
        assert answer["status"] == "success", answer
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found


def _shown(target: Target, result: Sequence[Mapping[str, Any]]) -> Iterator[Shown]:
    for series in result:
        points = series.get("values") or [series["value"]]
        labels = series["metric"]
        row = " ".join((target.ref_id, *(labels[name] for name in sorted(labels))))
        yield Shown(
            name=row if target.is_table else target.name_of(labels),
            labels=labels,
            values=[float(value) for _, value in points],
        )
