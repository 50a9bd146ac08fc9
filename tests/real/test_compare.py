"""`gpuledger compare` with a running agent, and a page in dcgm-exporter's form beside it."""

from __future__ import annotations

import itertools
import json
import re
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from gpuledger_cli.__main__ import main
from tests.real.services import web
from tests.real.services.page import serving
from tests.real.test_dcgm_exporter import CHART_ARGS, Exporter, start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LAST_VALUES = itertools.cycle((0, 100))
ARGUMENTS = ("--for", "2s", "--interval", "0.5s", "--format", "json")


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exporter]:
    exporter = start(tmp_path_factory.mktemp("compared"), *CHART_ARGS)
    try:
        yield exporter
    finally:
        exporter.process.stop(deadline_seconds=120)


def as_dcgm_exporter(page: str) -> str:
    """Rewrite the agent's page as dcgm-exporter before 4.8.3 would write it."""
    lines = []
    value = next(LAST_VALUES)  # at one time a kernel runs, at another none
    for line in page.splitlines():
        if line.startswith("gpuledger_"):
            continue
        if line.startswith("DCGM_FI_DEV_GPU_UTIL{"):
            series = line.rpartition(" ")[0]
            lines.append(f"{series} {value}".replace(",hostname=", ",Hostname="))
        elif not line.startswith("DCGM_FI_DEV_FB_FREE{"):
            lines.append(line.replace(",hostname=", ",Hostname="))
    lines += ["# TYPE DCGM_FI_DEV_CPU_POWER_WATTS gauge", 'DCGM_FI_DEV_CPU_POWER_WATTS{cpu="0"} 9']
    return "\n".join([*lines, ""])


@pytest.fixture
def dcgm_exporter(agent: Exporter) -> Iterator[Callable[[Callable[[str], str]], str]]:
    """Return a function that starts a server with a rewritten page, and returns its address."""
    with ExitStack() as servers:

        def serve(rewrite: Callable[[str], str]) -> str:
            page = serving(lambda: rewrite(web.fetch(f"{agent.url}/metrics").body.decode()))
            return f"http://{servers.enter_context(page)}"

        yield serve


def test_the_agent_compared_with_itself_has_no_difference(
    agent: Exporter, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", agent.url, "--with", agent.url, *ARGUMENTS]) == 0
    printed = capsys.readouterr()
    rows = [json.loads(line) for line in printed.out.splitlines()]
    assert {row["result"] for row in rows} == {"same"}
    assert len({row["gpu"] for row in rows}) == 3
    assert len({row["metric"] for row in rows}) > 15


def test_differences_of_dcgm_exporter_are_explained_and_a_wrong_value_is_not(
    agent: Exporter,
    dcgm_exporter: Callable[[Callable[[str], str]], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = dcgm_exporter(as_dcgm_exporter)
    assert main(["compare", url, "--with", agent.url, *ARGUMENTS]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    different = {(row["metric"], row["result"]): row["reason"] for row in rows if row["reason"]}
    wanted = {
        ("DCGM_FI_DEV_GPU_UTIL", "value differs"): "mean of its sampling interval",
        ("DCGM_FI_DEV_FB_FREE", "missing in dcgm-exporter"): "lacks the field",
        ("DCGM_FI_DEV_CPU_POWER_WATTS", "missing in gpuledger"): "CPUs",
        ("DCGM_FI_DEV_GPU_TEMP", "label differs"): "exposition.host_label",
    }
    assert all(words in different[key] for key, words in wanted.items())

    wrong = dcgm_exporter(
        lambda page: re.sub(r"^(DCGM_FI_DEV_FB_USED\{.*\}) .*$", r"\1 1", page, flags=re.MULTILINE)
    )
    assert main(["compare", wrong, "--with", agent.url, *ARGUMENTS[:4]]) == 1
    printed = capsys.readouterr()
    assert re.search(
        r"^DCGM_FI_DEV_FB_USED +GPU-\S+ +value differs +1 .* unknown *$", printed.out, re.MULTILINE
    )
    assert "without a known reason" in printed.out.splitlines()[-1]


def test_an_address_without_dcgm_metrics_is_named(
    agent: Exporter, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", f"{agent.url}/livez", "--with", agent.url, *ARGUMENTS]) == 2
    assert "/livez: no" in capsys.readouterr().err
    assert main(["compare", agent.url, "--with", "http://127.0.0.1:9", *ARGUMENTS]) == 2
    assert "127.0.0.1:9" in capsys.readouterr().err
