"""`gpuledger doctor`: options, the list of checks, and the printed result.

Each check is a function in another module of this package. `verdicts` runs the checks.
"""

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal, get_args

import msgspec
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpuledger import __version__
from gpuledger.bus.inspection import Inspector, open_inspector
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Bus, HistoryReader
from gpuledger.clock import NS_PER_MS
from gpuledger.errors import ArgumentError, UnavailableError, UserError
from gpuledger.runtime import configure_logs
from gpuledger.runtime.http.client import open_http
from gpuledger.settings import KafkaSettings, LogSettings, load_settings
from gpuledger.settings.groups import require_http_url
from gpuledger_agent.settings import AgentSettings
from gpuledger_agent.source_selection import open_source
from gpuledger_cli.doctor.endpoint_checks import (
    check_alertmanagers,
    check_components,
    check_remote_write,
)
from gpuledger_cli.doctor.kafka_checks import (
    check_brokers,
    check_groups,
    check_permissions,
    check_topics,
)
from gpuledger_cli.doctor.node_checks import (
    check_cgroups,
    check_driver,
    check_kubelet,
    check_processes,
)
from gpuledger_cli.doctor.record_checks import (
    Fleet,
    check_clocks,
    check_coverage,
    check_nodes,
    check_podwatch,
)
from gpuledger_cli.doctor.verdicts import (
    Check,
    Finding,
    Status,
    Verdict,
    exit_code,
    problem,
    run_check,
    run_checks,
    skipped,
    unknown,
)
from gpuledger_cli.kafka_options import KafkaOptions
from gpuledger_cli.option_help import duration_option, epilogue, limits, parse_seconds
from gpuledger_sinks.settings import AlertsSettings, RemoteWriteSettings

Format = Literal["table", "json"]
Component = Literal["agent", "podwatch", "join", "remote_write", "alerts", "store", "rows"]
Receiver = Literal["remote_write", "alerts"]
_KafkaCheck = Literal[
    "brokers", "topics", "permissions", "groups", "podwatch", "nodes", "clocks", "coverage"
]
_NodeCheck = Literal["driver", "processes", "kubelet", "cgroups"]
KAFKA_CHECKS: Final[tuple[str, ...]] = get_args(_KafkaCheck)
"""The checks that need Kafka, in the order of the result."""
CheckName = Literal[_KafkaCheck, "components", "receivers", _NodeCheck]
_COLOURS: Final = {
    Status.OK: "green",
    Status.PROBLEM: "red",
    Status.UNKNOWN: "yellow",
    Status.SKIPPED: "dim",
}
_WIDTH_IN_FILES: Final = 200
_BROKERS: Final = "brokers"
_BROKERS_ACTION: Final = (
    "Start the brokers, or correct --bootstrap-servers or the section kafka of --config."
)
app = App(
    name="doctor",
    help_format="plaintext",
    help_epilogue=epilogue(
        "doctor changes nothing. On Kafka it needs the permissions of its row in `gpuledger topics"
        " export`. A check that cannot run is `unknown`, never `ok`.",
        examples={
            "Kafka, podwatch and all nodes": "gpuledger doctor --bootstrap-servers kafka:9092",
            "Also the checks of these components": (
                "gpuledger doctor http://join:9822 http://sink-store:9823"
            ),
            "The permissions of the join's user": "gpuledger doctor --config join.yaml --as join",
            "The receiver of a sink": (
                "gpuledger doctor --config sink.yaml --receiver remote_write"
            ),
            "On a GPU node": "gpuledger doctor --node --config agent.yaml",
            "The actions, for a script": ("gpuledger doctor --format json | jq -r .action"),
        },
        codes={
            0: "all checks passed or were skipped",
            1: "at least one problem",
            2: "no problem, but a check could not run; or invalid input",
        },
    ),
)


class ReceiverSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sections of a sink's settings that name its receivers."""

    remote_write: RemoteWriteSettings = RemoteWriteSettings()
    """Settings of the sink that sends samples."""
    alerts: AlertsSettings = AlertsSettings()
    """Settings of the sink that sends alerts."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DoctorOptions(KafkaOptions):
    """The options of the connection, whose settings file other checks read too."""

    config: Annotated[
        Path | None,
        Parameter(
            help="Settings file (YAML) of a component. doctor reads section kafka; with --receiver"
            " also the receiver's section; with --node all settings."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The checks to run, in addition to those of Kafka."""

    urls: Sequence[str] = ()
    """Addresses of components."""
    components: Sequence[str] = ()
    """Components whose permissions the Kafka user must have."""
    receivers: Sequence[str] = ()
    """Kinds of sinks whose receivers to check."""
    on_node: bool = False
    """Whether to check this machine as a GPU node."""
    config: Path | None = None
    """Settings file of the agent or the sink."""
    left_out: frozenset[str] = frozenset()
    """Checks to leave out."""
    deadline_seconds: float = 20.0

    @property
    def request_seconds(self) -> float:
        """Timeout of a request, which ends before its check, because its error names the cause."""
        return self.deadline_seconds * 0.8


@app.default
def doctor(
    *urls: Annotated[
        str,
        Parameter(
            name="URL", help="Addresses of components; their own checks (/readyz) are included."
        ),
    ],
    as_: Annotated[
        list[Component] | None,
        Parameter(
            name="--as",
            help="Check that the connected Kafka user has the permissions of this component.",
            negative=(),
        ),
    ] = None,
    receiver: Annotated[
        list[Receiver] | None,
        Parameter(
            help="Check the receiver of this sink, with its section of --config and its variables.",
            negative=(),
        ),
    ] = None,
    node: Annotated[
        bool,
        Parameter(
            help="Check this machine as a GPU node, with the agent's --config and variables.",
            negative=(),
        ),
    ] = False,
    skip: Annotated[
        list[CheckName] | None, Parameter(help="Checks to leave out.", negative=())
    ] = None,
    timeout: Annotated[
        str, duration_option("Deadline of each check", forms=limits(1, 600))
    ] = "20s",
    format: Annotated[  # noqa: A002  # the option's name
        Format, Parameter(help="table, or json: one object for each finding.")
    ] = "table",
    kafka: DoctorOptions = DoctorOptions(),
) -> int:
    """Check a running installation, and print what to do about each problem."""
    for url in urls:
        try:
            require_http_url(url)
        except ValueError as error:
            raise ArgumentError("URL", str(error)) from error
    plan = Plan(
        urls=urls,
        components=as_ or (),
        receivers=receiver or (),
        on_node=node,
        config=kafka.config,
        left_out=frozenset(skip or ()),
        deadline_seconds=parse_seconds(timeout, option="--timeout", minimum=1, maximum=600),
    )
    # Log lines of this program would interrupt the table. Errors become findings.
    configure_logs(LogSettings(level="error"))
    findings = asyncio.run(examine(kafka.settings(), plan))
    if format == "json":
        for finding in findings:
            sys.stdout.write(f"{msgspec.json.encode(finding).decode()}\n")
    else:
        print_table(findings)
    return exit_code(findings)


async def examine(settings: KafkaSettings, plan: Plan) -> list[Finding]:
    """Run all checks and return their findings."""
    on_node = await _node_checks(plan) if plan.on_node else {}
    async with open_http(
        headers={"User-Agent": f"gpuledger/{__version__}"}, timeout_seconds=plan.request_seconds
    ) as http:
        others: dict[str, Check] = {
            "components": partial(check_components, http, plan.urls),
            "receivers": partial(_check_receivers, plan),
            **on_node,
        }
        of_kafka, of_others = await asyncio.gather(
            _examine_kafka(settings, plan), _run(others, plan)
        )
    return [*of_kafka, *of_others]


async def _run(checks: Mapping[str, Check], plan: Plan) -> list[Finding]:
    return await run_checks(checks, deadline_seconds=plan.deadline_seconds, left_out=plan.left_out)


async def _examine_kafka(settings: KafkaSettings, plan: Plan) -> list[Finding]:
    timeout_seconds = min(settings.request_timeout_seconds, plan.request_seconds)
    settings = msgspec.structs.replace(settings, request_timeout_seconds=timeout_seconds)
    async with AsyncExitStack() as stack:
        return await _run(await _connect(stack, settings, plan), plan)


async def _connect(
    stack: AsyncExitStack, settings: KafkaSettings, plan: Plan
) -> Mapping[str, Check]:
    """Return the checks that need Kafka, which use a connection that the stack closes."""
    if _BROKERS in plan.left_out:
        left_out = skipped("left out, because it needs the brokers")
        return _fixed(KAFKA_CHECKS, first=left_out, others=left_out)
    bus, now_ns = KafkaBus(settings), time.time_ns()
    try:
        brokers = await stack.enter_async_context(open_inspector(settings))
    except (UnavailableError, UserError) as error:
        return _fixed(
            KAFKA_CHECKS,
            first=problem(str(error), _BROKERS_ACTION),
            others=unknown("not checked, because no broker could be used"),
        )
    fleet = Fleet(bus)
    stack.push_async_callback(fleet.close)
    reader = await stack.enter_async_context(bus.reader())
    return make_kafka_checks(brokers, bus, reader, fleet, components=plan.components, now_ns=now_ns)


def make_kafka_checks(
    brokers: Inspector,
    bus: Bus,
    reader: HistoryReader,
    fleet: Fleet,
    *,
    components: Sequence[str] = (),
    now_ns: int,
) -> dict[str, Check]:
    """Return the checks that need Kafka, by name."""
    return {
        _BROKERS: partial(check_brokers, brokers),
        "topics": partial(check_topics, brokers),
        "permissions": partial(check_permissions, brokers, bus.topics, components),
        "groups": partial(check_groups, brokers, reader, bus.topics, now_ms=now_ns // NS_PER_MS),
        "podwatch": partial(check_podwatch, bus, now_ns=now_ns),
        "nodes": partial(check_nodes, bus, fleet),
        "clocks": partial(check_clocks, bus, fleet, brokers),
        "coverage": partial(check_coverage, bus, fleet, now_ns=now_ns),
    }


def _fixed(names: Sequence[str], *, first: Verdict, others: Verdict) -> dict[str, Check]:
    """Return checks that do nothing: the first has one verdict, and the others have another."""

    async def give(verdict: Verdict) -> list[Verdict]:
        return [verdict]

    return {name: partial(give, others if number else first) for number, name in enumerate(names)}


async def _check_receivers(plan: Plan) -> list[Verdict]:
    if not plan.receivers:
        return [
            skipped(
                "no --receiver given",
                "Add --receiver and the sink's --config to check a receiver.",
            )
        ]
    settings = load_settings(
        ReceiverSettings,
        prog="gpuledger doctor",
        description="",
        argv=_config_argument(plan),
        ignores_other_sections=True,
    )
    seconds = plan.request_seconds
    checks: dict[str, Check] = {
        "remote_write": partial(check_remote_write, settings.remote_write, seconds=seconds),
        "alerts": partial(check_alertmanagers, settings.alerts, seconds=seconds),
    }
    # Each runs separately, so that invalid credentials of one do not hide the result of another.
    results = await asyncio.gather(
        *(
            run_check(check, deadline_seconds=plan.deadline_seconds)
            for name, check in checks.items()
            if name in plan.receivers
        )
    )
    return [verdict for verdicts in results for verdict in verdicts]


async def _node_checks(plan: Plan) -> Mapping[str, Check]:
    """Return the checks of a node; if the settings are invalid, checks without a result."""
    try:
        settings = load_settings(
            AgentSettings,
            prog="gpuledger doctor",
            description="",
            argv=_config_argument(plan),
            ignores_other_sections=True,
        )
        if settings.source == "auto":
            # Otherwise a node without a working driver would have no source to check.
            settings = msgspec.structs.replace(settings, source="nvml")
        host = await open_source(settings)
    except (UnavailableError, UserError) as error:
        return _fixed(
            get_args(_NodeCheck),
            first=unknown(str(error), "Correct the agent's settings in --config or variables."),
            others=unknown("not checked, because the agent's settings cannot be used"),
        )
    return {
        "driver": partial(check_driver, host),
        "processes": partial(check_processes, host, settings),
        "kubelet": partial(check_kubelet, host, settings.kubelet),
        "cgroups": partial(check_cgroups, settings.kubelet),
    }


def _config_argument(plan: Plan) -> list[str]:
    return [f"--config={plan.config}"] if plan.config else []


def print_table(findings: Sequence[Finding]) -> None:
    """Print a row for each finding; the name of a check appears only in its first row."""
    table = Table("check", "status", "finding", "what to do", box=None, pad_edge=False)
    former = ""
    for finding in findings:
        colour = _COLOURS[finding.status]
        table.add_row(
            "" if finding.check == former else finding.check,
            f"[{colour}]{finding.status}[/]",
            Text(finding.finding),
            Text(finding.action),
        )
        former = finding.check
    Console(width=None if sys.stdout.isatty() else _WIDTH_IN_FILES).print(table)
