"""The report `faults`: how often GPUs fail, and how many GPU-hours failures cost.

`failures` groups incidents into failures, and `failure_rates` has the statistics.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import duckdb
import orjson

from gpuledger.store.views import with_nodes
from gpuledger_reports.capacity.allocations import USAGE, usage_limits
from gpuledger_reports.capacity.cordons import create_cordoned
from gpuledger_reports.capacity.failure_rates import binomial_tail, poisson_interval
from gpuledger_reports.capacity.failures import (
    CAUSES,
    CONTAINED_ECC,
    LOST,
    DeviceHour,
    Failure,
    Gpu,
    SeenIncident,
    find_failures,
    stalled_minutes,
)
from gpuledger_reports.capacity.pod_shapes import read_shape
from gpuledger_reports.capacity.report import (
    GPU_DIMENSIONS,
    Answer,
    Key,
    Question,
    Report,
    Row,
    plain_cell,
)
from gpuledger_reports.capacity.waits import read_fractions
from gpuledger_reports.reading.times import HOUR_US, Window

_COLUMNS: Final[Mapping[str, str]] = {
    "gpus": "GPUs",
    "failures": "Failures",
    "rate": "Per GPU-year",
    "rate_low": "95 % interval",
    "rate_high": "",
    "expected_failures": "Expected",
    "p_value": "",
    "lost_gpu_hours": "Lost GPU-hours",
    "unresponsive_gpu_hours": "",
    "stalled_gpu_hours": "",
    "cordoned_gpu_hours": "Cordoned",
    "interrupted_gpu_hours": "Interrupted",
    "causes": "Causes",
    "note": "Note",
}
_CAUSE: Final = "cause"
_CORDONED_CAUSE: Final = "cordoned"
"""The value of the dimension `cause` for GPUs that were free on a cordoned node."""
_PHYSICAL_GPU: Final = "coalesce(parent_uuid, gpu_uuid)"
_DIMENSIONS: Final[Mapping[str, str]] = {
    **GPU_DIMENSIONS,
    "node": "node",
    "gpu": "gpu",
    _CAUSE: "NULL",
}
_HOURS_A_YEAR: Final = 8760
_SIGNIFICANT: Final = 0.05
_GPUS: Final = f"""(
    SELECT cluster, node, {_PHYSICAL_GPU} AS gpu, model, max(time) AS time,
        sum(allocated_gpu_hours) AS gpu_hours,
        sum(unresponsive_ns * device_fraction) / 3.6e12 AS unresponsive_hours
    FROM {USAGE} WHERE category = 'idle' GROUP BY ALL
)"""  # noqa: S608  # no user's text
"""Each GPU, with the time of its last row."""
_GPUS_WITH_GROUPS: Final = f"""
SELECT {{columns}}, cluster, node, gpu, model, gpu_hours, unresponsive_hours
FROM {with_nodes(_GPUS)}
"""  # noqa: S608  # no user's text
_INCIDENTS: Final = f"""
SELECT DISTINCT cluster, node, gpu_uuid, epoch_us(time) AS time_us, kind, xid, pods FROM incidents
WHERE time >= make_timestamptz($begin_us) AND time < make_timestamptz($end_us)
    AND present_at_start IS NOT true AND (severity = 'critical' OR xid = {CONTAINED_ECC})
ORDER BY time_us
"""  # noqa: S608  # no user's text
_CORDONED_HOURS: Final = """
SELECT cluster, node, gpu, sum(hours * device_fraction) FROM cordoned_hours GROUP BY ALL
"""
# By device, because instances of a GPU may be used again at different times. In hours without
# bitmaps, the device may have been used, so all of their minutes count as released.
_STALLED: Final = f"""
WITH failed AS (
    SELECT number, cluster, node, gpu, date_trunc('hour', make_timestamptz(begin_us)) AS since,
        make_timestamptz(end_us) AS until
    FROM (SELECT unnest(from_json($failures, '[{{"number": "BIGINT", "cluster": "VARCHAR",
        "node": "VARCHAR", "gpu": "VARCHAR", "begin_us": "BIGINT", "end_us": "BIGINT"}}]'),
        recursive := true))
)
SELECT number, gpu_uuid, max(device_fraction), epoch_us(hour) // {HOUR_US},
    coalesce(bit_or(allocated_minutes) FILTER (allocated_job_id IS NOT NULL
        OR allocated_pod_state <> 'unknown'), 0),
    coalesce(bit_or(used_minutes), 0),
    coalesce(bit_or(coalesce(allocated_minutes, -1)) FILTER (category = 'idle'
        AND (allocated_minutes IS NULL OR
            allocated_job_id IS NULL AND allocated_pod_state IS NULL)), 0),
    bool_or(category = 'idle' AND allocated_minutes IS NULL)
FROM usage_hourly_unnamed JOIN failed USING (cluster, node)
WHERE {_PHYSICAL_GPU} = gpu AND hour >= since AND hour < until AND device_fraction IS NOT NULL
GROUP BY ALL
"""  # noqa: S608  # no user's text
_RUNS: Final = """
SELECT cluster, pod_uid, epoch_us(min(coalesce(started_time, scheduled_time, created_time))),
    epoch_us(max(coalesce(ended_time, deleted_time))),
    list(DISTINCT {'container': container, 'requested': requested}) FILTER (requested IS NOT NULL)
FROM pods WHERE pod_uid IN (SELECT unnest(from_json($pods, '["VARCHAR"]')))
    AND coalesce(owner_kind, '') NOT IN ('Deployment', 'ReplicaSet', 'StatefulSet', 'DaemonSet')
GROUP BY ALL
"""
_END_US: Final = (-60_000_000, 600_000_000)
"""If a run ends within this time after a failure, the failure interrupted it. The range begins
before the failure, because clocks may differ."""
_STALLED_US: Final = 24 * HOUR_US
"""Time after a failure in which allocated but unused time counts as lost to it."""


@dataclass(kw_only=True)
class _Losses:
    """The failures of a row's GPUs, and the GPU-hours that they cost."""

    causes: Counter[str] = field(default_factory=Counter)
    """Failures by cause."""
    unresponsive: float = 0.0
    cordoned: float = 0.0
    stalled: float = 0.0
    interrupted: float = 0.0


class _Table:
    """Collects the hours and failures of each row, by the dimensions."""

    def __init__(self, by: Sequence[str]) -> None:
        self._by = by
        self.hours: dict[Key, dict[str | None, float]] = defaultdict(lambda: defaultdict(float))
        """GPU-hours by model, for each key without its cause."""
        self.losses: dict[Key, _Losses] = defaultdict(_Losses)
        self.failures: Counter[tuple[str | None, str | None]] = Counter()
        """Failures by model and, if `cause` is a dimension, by cause."""

    def with_cause(self, key: Key, cause: str | None) -> Key:
        """Return the key of the row for a cause, or without one."""
        return tuple(
            cause if name == _CAUSE else value for name, value in zip(self._by, key, strict=True)
        )

    def cause_of(self, key: Key) -> str | None:
        """Return the cause in a key."""
        return dict(zip(self._by, key, strict=True)).get(_CAUSE)

    def add(
        self, key: Key, model: str | None, cause: str, *, stalled: float, interrupted: float
    ) -> None:
        """Add a failure of a GPU of the model, with the GPU-hours that it cost."""
        key = self.with_cause(key, cause)
        losses = self.losses[key]
        losses.causes[cause] += 1
        losses.stalled += stalled
        losses.interrupted += interrupted
        self.failures[model, self.cause_of(key)] += 1

    def without_losses(self) -> int:
        """Return the number of groups of GPUs without a row."""
        return len(self.hours.keys() - {self.with_cause(key, None) for key in self.losses})

    def rows(self, window_hours: float) -> list[Row]:
        """Return the rows, the most important first."""
        of_models: dict[str | None, float] = defaultdict(float)
        for hours in self.hours.values():
            for model, count in hours.items():
                of_models[model] += count
        # Bonferroni correction for each group, or each of its causes: at most 5 % of reports have a
        # note by chance.
        tests = len(self.hours) * (len(CAUSES) if _CAUSE in self._by else 1)
        ranked = []
        for key, losses in self.losses.items():
            hours = self.hours[self.with_cause(key, None)]
            known = {model: self.failures[model, self.cause_of(key)] for model in hours}
            expected = sum(
                known[model] * count / of_models[model] for model, count in hours.items() if count
            )
            row = _row(losses, sum(hours.values()), window_hours, expected, sum(known.values()))
            is_worse = row["p_value"] * tests < _SIGNIFICANT
            if is_worse:
                row["note"] = (
                    f"fails more often than its model: {row['failures']} failures,"
                    f" {expected:.1f} expected, p = {row['p_value']:.2g}"
                )
            order = (
                not is_worse,
                -row["lost_gpu_hours"] - row["interrupted_gpu_hours"],
                -row["failures"],
            )
            ranked.append((order, dict(zip(self._by, key, strict=True)) | row))
        return [row for _, row in sorted(ranked, key=lambda item: item[0])]


def _row(
    losses: _Losses, hours: float, window_hours: float, expected: float, of_models: int
) -> Row:
    count, years = losses.causes.total(), hours / _HOURS_A_YEAR
    low, high = poisson_interval(count)
    return {
        "gpus": round(hours / window_hours, 2),
        "failures": count,
        "rate": round(count / years, 3) if years else None,
        "rate_low": round(low / years, 3) if years else None,
        "rate_high": round(high / years, 3) if years else None,
        "expected_failures": round(expected, 2),
        "p_value": binomial_tail(count, of_models, expected / of_models if of_models else 0.0),
        "lost_gpu_hours": round(losses.unresponsive + losses.stalled + losses.cordoned, 3),
        "unresponsive_gpu_hours": round(losses.unresponsive, 3),
        "stalled_gpu_hours": round(losses.stalled, 3),
        "cordoned_gpu_hours": round(losses.cordoned, 3),
        "interrupted_gpu_hours": round(losses.interrupted, 3),
        "causes": ", ".join(f"{cause} ({count})" for cause, count in losses.causes.most_common())
        or None,
        "note": None,
    }


def _read(connection: duckdb.DuckDBPyConnection, question: Question) -> Answer:
    window = question.window
    table, gpus = _read_gpus(connection, question)
    failures = _read_failures(connection, window)
    known = [failure for failure in failures if failure.gpu in gpus]
    stalled, is_complete = _stalled(connection, known, window)
    interrupted, unsized = _interrupted(connection, known)
    for failure, unused, ended in zip(known, stalled, interrupted, strict=True):
        table.add(*gpus[failure.gpu], failure.cause, stalled=unused, interrupted=ended)
    notes = []
    if left_out := len(failures) - len(known):
        notes.append(f"Failures of GPUs without usage are not included: {left_out}.")
    if not is_complete:
        notes.append(
            "For some hours, it is unknown whether a failed GPU was used again, because an earlier"
            " version of gpuledger summed them up. The lost GPU-hours may be higher."
        )
    if unsized:
        notes.append(
            f"Interrupted runs with claims or shares of unknown size: {unsized}. Their GPU-hours"
            " are not included."
        )
    rows = table.rows((window.end_us - window.begin_us) / HOUR_US)
    if rows and (without := table.without_losses()):
        notes.append(
            f"Groups of GPUs without failures or lost time are not shown: {without} of"
            f" {len(table.hours)}."
        )
    return Answer(rows=rows, notes=notes)


def _read_gpus(
    connection: duckdb.DuckDBPyConnection, question: Question
) -> tuple[_Table, dict[Gpu, tuple[Key, str | None]]]:
    """Return a table of all GPUs with their lost time, and the group and model of each GPU."""
    columns = ", ".join(f"{_DIMENSIONS[name]} AS {name}_" for name in question.by)
    table, gpus = _Table(question.by), dict[Gpu, tuple[Key, str | None]]()
    for *key, cluster, node, gpu, model, hours, unresponsive in connection.execute(
        _GPUS_WITH_GROUPS.format(columns=columns), usage_limits(connection, question.window)
    ).fetchall():
        gpus[cluster, node, gpu] = (tuple(key), model)
        table.hours[tuple(key)][model] += hours or 0.0
        if unresponsive:
            table.losses[table.with_cause(tuple(key), LOST)].unresponsive += unresponsive
    create_cordoned(connection, question.window)
    for cluster, node, gpu, cordoned in connection.execute(_CORDONED_HOURS).fetchall():
        if cordoned and (found := gpus.get((cluster, node, gpu))):
            table.losses[table.with_cause(found[0], _CORDONED_CAUSE)].cordoned += cordoned
    return table, gpus


def _read_failures(connection: duckdb.DuckDBPyConnection, window: Window) -> list[Failure]:
    return find_failures(
        SeenIncident((cluster, node, gpu), time_us, kind, xid, _uids(pods))
        for cluster, node, gpu, time_us, kind, xid, pods in connection.execute(
            _INCIDENTS, window._asdict()
        ).fetchall()
    )


def _uids(pods: str | None) -> tuple[str, ...]:
    try:
        return tuple(str(pod["uid"]) for pod in orjson.loads(pods or "[]"))
    except (KeyError, TypeError, ValueError):
        return ()


def _stalled(
    connection: duckdb.DuckDBPyConnection, failures: Sequence[Failure], window: Window
) -> tuple[list[float], bool]:
    """Return the GPU-hours for which each failed GPU stayed allocated and unused.

    The second value is whether this is known for all hours.
    """
    ends, next_us = [], dict[Gpu, int]()
    for failure in reversed(failures):
        # The next failure of the GPU counts its own time.
        last_us = next_us.get(failure.gpu, window.end_us)
        ends.append(min(failure.time_us + _STALLED_US, last_us))
        next_us[failure.gpu] = failure.time_us
    ends.reverse()
    # As JSON, because a list of thousands of parameters takes seconds.
    given = [
        dict(zip(("cluster", "node", "gpu"), each.gpu, strict=True))
        | {"number": number, "begin_us": each.time_us, "end_us": ends[number]}
        for number, each in enumerate(failures)
    ]
    devices: dict[tuple[int, str, float], dict[int, DeviceHour]] = defaultdict(dict)
    is_complete = True
    for number, device, fraction, hour, allocated, used, free, is_unknown in connection.execute(
        _STALLED, {"failures": orjson.dumps(given).decode()}
    ).fetchall():
        devices[number, device, fraction][hour] = DeviceHour(allocated, used, free)
        is_complete &= not is_unknown
    found = [0.0] * len(failures)
    for (number, _, fraction), hours in devices.items():
        minutes = stalled_minutes(failures[number].time_us, ends[number], hours)
        found[number] += fraction * minutes / 60
    return found, is_complete


def _interrupted(
    connection: duckdb.DuckDBPyConnection, failures: Sequence[Failure]
) -> tuple[list[float], int]:
    """Return the GPU-hours of the runs that each failure ended. Each run counts once.

    The second value is the number of runs without a known size, which count as 0 GPU-hours.
    """
    uids = list({uid for failure in failures for uid in failure.pods})
    runs = {
        (cluster, uid): (begin_us, end_us, [each["requested"] for each in containers or []])
        for cluster, uid, begin_us, end_us, containers in connection.execute(
            _RUNS, {"pods": orjson.dumps(uids).decode()}
        ).fetchall()
    }
    fractions = read_fractions(connection) if runs else {}
    found, unsized = [], 0
    for failure in failures:
        hours = 0.0
        for uid in failure.pods:
            begin_us, end_us, requests = runs.get((failure.gpu[0], uid), (0, None, []))
            if end_us is None or not _END_US[0] <= end_us - failure.time_us <= _END_US[1]:
                continue
            del runs[failure.gpu[0], uid]
            gpus = read_shape(requests, fractions).gpus
            unsized += gpus is None
            hours += (gpus or 0.0) * max(0, failure.time_us - begin_us) / HOUR_US
        found.append(hours)
    return found, unsized


def _cell(name: str, row: Mapping[str, Any]) -> str:
    if name == "rate_low" and row[name] is not None:
        return f"{plain_cell(name, row)} to {plain_cell('rate_high', row)}"
    return plain_cell(name, row)


REPORT: Final = Report(
    name="faults",
    summary="Show how often GPUs fail, and how many GPU-hours failures cost.",
    about=(
        "A failure is a critical incident, or an XID 94, whether the GPU is in use or not."
        " Incidents of one GPU belong to one failure until an hour passes without another. `Per"
        " GPU-year` has an exact 95 % Poisson confidence interval. `Expected` is the number of"
        " failures at the mean rate of the model, including the failures of this row. Rows that"
        " fail significantly more often come first, with a note; the test corrects for the number"
        " of groups. A note counts the groups without failures or lost time. `Lost GPU-hours` count"
        " the time in which a GPU did not respond, and up to a day after a failure in which it was"
        " allocated but not used again. They include `Cordoned`: time in which a GPU was free on a"
        " node that was cordoned for any reason. `Interrupted` are GPU-hours of runs that ended"
        " within ten minutes after a failure; the work since their last checkpoint is lost. Pods of"
        " Deployments, ReplicaSets, StatefulSets and DaemonSets, and Slurm jobs, are not included."
        " The values of `cause` are `ecc`, `lost` (XID 79, or no response), `xid`, `other` and"
        " `cordoned`. A failure has the first cause that applies; time without a response always"
        " counts as `lost`. The report does not detect taints, or failures and cordons in hours"
        " without samples."
    ),
    examples={
        "The last 30 days, by model and node": "",
        "GPU-hours by cause": "--by cause",
        "Failure rates of models in a quarter": "--by model --window 90d",
    },
    columns=_COLUMNS,
    droppable=(
        "causes",
        "expected_failures",
        "rate_low",
        "cordoned_gpu_hours",
        "interrupted_gpu_hours",
    ),
    cell=_cell,
    texts=frozenset({"causes", "note"}),
    counts=frozenset({"failures"}),
    dimensions=_DIMENSIONS,
    default_by="model,node",
    codes=(
        "at least one GPU failed, did not respond, or was free on a cordoned node",
        "no GPU is known to have failed",
    ),
    read=_read,
)
