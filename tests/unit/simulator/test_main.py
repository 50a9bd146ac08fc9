"""`python -m gpuledger_simulator`: its commands, and the lines in which it reports errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpuledger.errors import UserError
from gpuledger_simulator.__main__ import main
from gpuledger_simulator.identities import FileUids, write_uids
from gpuledger_simulator.simulation import choose_epoch_ns
from tests.errors import has_words
from tests.hanging import HANG_SECONDS


def test_truth_prints_one_object_per_pod(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    arguments = ["--scenario", "scenarios/quickstart.yaml", "--end-seconds", "20"]
    assert main(["truth", *arguments, "--epoch-ns", "1"]) == 0
    lines = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert len(lines) == 6
    assert lines[0]["owner_kind"] == "PyTorchJob"
    assert lines[0]["busy_seconds"] == pytest.approx(36, abs=1)


def test_an_invalid_scenario_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["truth", "--scenario", "nowhere.yaml", "--end-seconds", "1"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("simulator: nowhere.yaml: No such file")
    assert message.count("\n") == 1


@pytest.mark.parametrize("command", ["kube-api", "drive", "truth"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert "--epoch-file" in capsys.readouterr().out


def test_processes_that_share_a_file_agree_on_the_epoch(tmp_path: Path) -> None:
    file = tmp_path / "epoch"
    first = choose_epoch_ns(0, file=file)
    assert choose_epoch_ns(0, file=file) == first
    assert choose_epoch_ns(7, file=file) == 7
    assert choose_epoch_ns(0) > first
    assert [path.name for path in tmp_path.iterdir()] == ["epoch"]


def test_a_file_without_an_epoch_is_a_user_error(tmp_path: Path) -> None:
    file = tmp_path / "epoch"
    file.write_text("soon")
    with pytest.raises(UserError, check=has_words(str(file))):
        choose_epoch_ns(0, file=file)
    with pytest.raises(UserError, check=has_words(str(tmp_path / "none" / "epoch"))):
        choose_epoch_ns(0, file=tmp_path / "none" / "epoch")


def test_uids_of_another_epoch_are_ignored_and_new_ones_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "uids.json"
    write_uids(file, epoch_ns=1, uids={"a/p": "u1"})
    uids = FileUids(file, epoch_ns=2)
    assert uids.uid("a/p") is None
    write_uids(file, epoch_ns=2, uids={"a/p": "u2"})
    assert uids.uid("a/p") == "u2"


def test_a_file_without_uids_is_a_user_error(tmp_path: Path) -> None:
    file = tmp_path / "uids.json"
    file.write_text("[]")
    with pytest.raises(UserError, check=has_words(str(file))):
        FileUids(file, epoch_ns=2).uid("a/p")


@pytest.mark.parametrize("listen", ["nowhere", "127.0.0.1:99999", "203.0.113.1:8001"])
def test_an_unusable_listen_address_is_one_line_and_exit_code_2(listen: str) -> None:
    command = [sys.executable, "-m", "gpuledger_simulator", "kube-api", "--listen", listen]
    command += ["--scenario", "scenarios/quickstart.yaml"]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert ended.returncode == 2
    assert "--listen" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_a_served_api_prints_its_url_and_ends_cleanly_on_sigterm(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    command = [sys.executable, "-m", "gpuledger_simulator", "kube-api", "--listen", "127.0.0.1:0"]
    command += ["--scenario", "scenarios/quickstart.yaml", "--kubeconfig", str(kubeconfig)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as server:
        assert server.stdout is not None
        reported = json.loads(server.stdout.readline())
        server.terminate()
        assert server.wait(timeout=HANG_SECONDS) == 0
    assert reported["url"] in kubeconfig.read_text()
    assert reported["epoch_ns"] > 0
