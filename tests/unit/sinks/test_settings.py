"""The settings of `gpuledger sink`, from its command line and environment."""

import re

import pytest

from gpuledger.errors import SettingsError
from gpuledger.settings import load_settings
from gpuledger_sinks.command import main
from gpuledger_sinks.registry import KINDS
from gpuledger_sinks.settings import SinkSettings
from tests.errors import has_words


def load(*argv: str, **environ: str) -> SinkSettings:
    return load_settings(
        SinkSettings,
        prog="gpuledger sink",
        description="",
        argv=argv,
        environ={f"GPULEDGER_{name}": value for name, value in environ.items()},
    )


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_requires_only_its_name(kind: str) -> None:
    assert load(KIND=kind).kind == kind


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("remotewrite", "remote_write"), ("alert", "alerts"), ("delta-store", "store")],
)
def test_an_unknown_kind_is_reported_with_the_nearest_one(
    typed: str, meant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpuledger sink", typed])

    assert main() == 2
    assert f"unknown sink: {typed!r}; did you mean {meant!r}?" in capsys.readouterr().err


def test_a_name_unlike_all_kinds_is_reported_with_the_kinds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpuledger sink", "prometheus"])

    assert main() == 2
    assert f"unknown sink: 'prometheus'; give {', '.join(KINDS)}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"KIND": "store", "STORE__URL": "x"}, "STORE__URI"),
        ({"KIND": "alerts", "ALERTS__URLS": "am:9093"}, "must begin with http"),
        ({"KIND": "remote_write", "REMOTE_WRITE__SAMPLES_PER_REQUEST": "0"}, "samples_per_request"),
        (
            {"KIND": "remote_write", "REMOTE_WRITE__POD_LABELS": "a.b,a-b"},
            "pod_labels: duplicate label label_a_b from a-b and a.b",
        ),
        (
            {
                "KIND": "remote_write",
                "REMOTE_WRITE__NODE_LABELS": "rack",
                "REMOTE_WRITE__EXTERNAL_LABELS": '{"label_rack": "r7"}',
            },
            "node_labels: duplicate label label_rack from rack and external_labels",
        ),
        (
            {"KIND": "remote_write", "REMOTE_WRITE__HEADER_FILES": '{"Host": "/etc/key"}'},
            "header_files: reserved header: Host",
        ),
        ({"KIND": "store", "STORE__FLUSH_ROWS": "0"}, "flush_rows"),
        ({"KIND": "store", "STORE__URI": "/data/a[1]"}, r"directory name: \[ \];"),
        ({"KIND": "store", "STORE__FLUSH_SECONDS": "-1"}, "flush_seconds"),
        ({"KIND": "rows", "ROWS__TOPIC": ""}, "ROWS__TOPIC"),
    ],
)
def test_an_invalid_setting_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=f"(?i){message}"):
        load(**environ)


def test_secrets_are_masked_in_printed_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        load("--print-config", KIND="remote_write", REMOTE_WRITE__BEARER_TOKEN="t0ken")

    assert "t0ken" not in capsys.readouterr().out


@pytest.mark.parametrize("variable", ["REMOTE_WRITE__URL", "ALERTS__URLS"])
@pytest.mark.parametrize(
    ("url", "output"),
    [
        ("http://", "'********': missing host"),
        ("http://usr:pw@", "'********': missing host"),
        ("http://:9090/w", "missing host"),
        ("https:///w", "missing host"),
        ("http://ho st/w", "missing host"),
        ("http://host/a b", "blank in the address"),
        ("http://host/w\r\nX: 1", "blank in the address"),
        ("http://ho\nst/w", "blank in the address"),
        ("http://host:0/w", "invalid port"),
        ("http://host:/w", "invalid port"),
        ("http://host/w#part", "fragments are not sent"),
        (
            "http://host:port/w",
            "'********': invalid port; use a port from 1 to 65535",
        ),
        ("http://host:99999/w", "'********': invalid port; use a port from 1"),
        ("http://usr:hunter2@host:99999/w", "'********': invalid port; use"),
        ("http://host:123456/w", "'********': invalid port; use a port from 1"),
        ("http://[::1/w", "invalid host; put an IPv6 address in brackets"),
        ("http://usr:hunter2[/x@host/w", "; in a user or password write / as %2F"),
        ("http://usr:hunter2/x@host/w", "; in a user or password write / as %2F"),
        ("http://usr:hunter2#pw@host:9090/w", "'********': invalid port"),
        ("host:9090/api/v1", "'host:9090/api/v1' must begin with http:// or https://"),
        ("usr:hunter2@host:9090/w", "'********' must begin with http:// or https://"),
        ("host:9090/w?token=hunter2", "'********' must begin with http:// or https://"),
        ("ftp://host/w", "must begin with http:// or https://"),
    ],
)
def test_an_invalid_address_is_rejected(variable: str, url: str, output: str) -> None:
    with pytest.raises(SettingsError) as raised:
        load(**{variable: url})

    assert output in str(raised.value)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    "url", ["http://a", "https://usr:p%40w@a.b:9090/w?x=y", "http://[::1]:9/w"]
)
def test_an_address_with_a_host_is_accepted(url: str) -> None:
    loaded = load(KIND="alerts", REMOTE_WRITE__URL=url, ALERTS__URLS=url)

    assert (loaded.remote_write.url, loaded.alerts.urls) == (url, [url])


@pytest.mark.parametrize("end", ["/api/v2/alerts", "/api/v2/alerts/", "/api/v1/alerts", "/api/v2"])
def test_an_alertmanagers_address_must_not_contain_the_path_that_is_added(end: str) -> None:
    named = has_words("ALERTS__URLS", f"prefix{end}", "use http://am:9093/prefix")
    with pytest.raises(SettingsError, check=named):
        load(KIND="alerts", ALERTS__URLS=f"http://am:9093/prefix{end}")

    assert load(KIND="alerts", ALERTS__URLS="http://am:9093/prefix/").alerts.urls


@pytest.mark.parametrize("group", ["a b/c", "a/b", "ä", "a\n", "a" * 201])
@pytest.mark.parametrize("kind", KINDS)
def test_an_invalid_consumer_group_is_rejected(kind: str, group: str) -> None:
    with pytest.raises(SettingsError, check=has_words("GPULEDGER_GROUP", "a-z, A-Z, 0-9")):
        load(KIND=kind, GROUP=group)


@pytest.mark.parametrize("kind", KINDS)
def test_the_help_of_a_kind_has_only_its_own_settings_and_the_common_ones(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpuledger sink", kind, "--help"])
    with pytest.raises(SystemExit):
        main()

    sections = set(re.findall(r"^ {6}GPULEDGER_(\w+?)__", capsys.readouterr().out, re.MULTILINE))
    assert sections == {"HTTP", "KAFKA", "LOG", kind.upper()}
