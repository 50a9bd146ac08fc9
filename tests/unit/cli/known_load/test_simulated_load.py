"""The scenario of a load has the requested use, with any number of processes."""

import json
from pathlib import Path

import pytest

from gpuledger_cli.__main__ import main
from gpuledger_cli.known_load.request import LoadRequest
from gpuledger_cli.known_load.simulated_load import SimulatedLoad
from tests.tables import for_each

EPOCH_NS = 1_795_000_000_000_000_000


def request(busy_ratio: float, processes: int) -> LoadRequest:
    return LoadRequest(
        gpu=0, busy_ratio=busy_ratio, process_bytes=1 << 30, processes=processes, seconds=60
    )


@for_each("busy_ratio", [0.05, 0.4, 0.8, 1.0])
@pytest.mark.parametrize("processes", [1, 2, 5])
def test_the_true_use_is_the_requested_use(busy_ratio: float, processes: int) -> None:
    load = SimulatedLoad(request(busy_ratio, processes), epoch_ns=EPOCH_NS)
    ratios = list(load.result(60).busy_ratios.values())
    assert sum(ratios) == pytest.approx(busy_ratio, abs=0.015)
    assert ratios == pytest.approx([busy_ratio / processes] * processes, abs=0.015)


def test_the_result_is_printed_after_the_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a load.yaml"
    options = ["--utilization", "30", "--for", "1s", "--scenario", str(file)]
    assert main(["load", "--simulated", "--memory-mib", "512", *options]) == 0
    printed = capsys.readouterr()
    assert f"--source 'simulated:{file}'" in printed.err
    assert "memory 512 MiB" in printed.out
    assert main(["load", "--simulated", "--format", "json", *options]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["end_ns"] - result["start_ns"] == 10**9


@for_each("options", [["--gpu=-1"], ["--gpu=-1", "--simulated"], ["--gpu=3", "--simulated"]])
def test_a_gpu_that_cannot_exist_is_refused(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["load", *options]) == 2
    assert "--gpu: invalid value" in capsys.readouterr().err


def test_a_load_that_does_not_fit_the_gpu_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = f"--scenario={tmp_path / 'load.yaml'}"
    assert main(["load", "--simulated", file, "--memory-mib=50000", "--processes=2"]) == 2
    assert capsys.readouterr().err == (
        "gpuledger: --memory-mib: invalid value 50000; the simulated GPU has room for 40494 in each"
        " process\n"
    )
    assert main(["load", "--simulated", "--scenario", str(tmp_path / "no" / "l"), "--for=1s"]) == 2
    assert "--scenario: cannot write" in capsys.readouterr().err
