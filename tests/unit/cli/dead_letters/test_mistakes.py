"""Invalid options are reported in one line, before anything is requested from Kafka."""

import pytest

from gpuledger_cli.__main__ import main


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["list", "--since", "yesterday"], "--since: invalid time 'yesterday'"),
        (["list", "--until", "25:00"], "--until: invalid time '25:00'"),
        (["list", "--limit", "0"], "--limit: 0 is only for --format json and csv"),
        (["list", "--count-by", "consumer,size"], "--count-by: unknown field: 'size'"),
        (["list", "--bootstrap-servers", "127.0.0.1:1"], "127.0.0.1:1"),
        (["show"], "PARTITION:OFFSET: missing"),
        (["show", "seventeen"], "PARTITION:OFFSET"),
        (["replay"], "--all"),
        (["replay", "17"], "PARTITION:OFFSET"),
        (["replay", "--all", "--config", "/absent.yaml"], "/absent.yaml"),
    ],
)
def test_an_invalid_option_is_one_line_and_exit_code_2(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dead-letters", *argv]) == 2

    printed = capsys.readouterr()
    assert named in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
