"""No output shows the secret of an address, however the address was mistyped."""

import json
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
import yaml

from gpuledger.errors import SettingsError, UserError
from gpuledger.settings import KafkaSettings, Secret, load_settings
from gpuledger.settings.secret import mask_address, mask_addresses, shown_url
from gpuledger_cli.demo.plan import check_url, find_store, parse_bus
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings
from gpuledger_sinks.settings import AlertsSettings, RemoteWriteSettings, StoreSettings
from tests.tables import for_each

PASSWORD = "S3cr3t"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kafka: KafkaSettings = KafkaSettings()
    kubernetes: KubernetesSettings = KubernetesSettings()
    remote_write: RemoteWriteSettings = RemoteWriteSettings()
    alerts: AlertsSettings = AlertsSettings()
    store: StoreSettings = StoreSettings()
    token: Secret | None = None
    ports: list[int] = []


def load(*argv: str, **variables: str) -> str:
    """Return everything that is shown of the settings, or of the error in them."""
    environ = {f"GPULEDGER_{name}": value for name, value in variables.items()}
    shown = StringIO()
    with redirect_stdout(shown), suppress(SystemExit):
        try:
            load_settings(
                Settings,
                prog="p",
                description="d",
                argv=["--print-config", *argv],
                environ=environ,
            )
        except SettingsError as error:
            return str(error)
    return shown.getvalue()


def load_key(address: str) -> str:
    """Return the error message if the address is a key of the settings file."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "s.yaml"
        file.write_text(yaml.safe_dump({"kafka": {address: 1}}))
        return load("--config", str(file)).replace(folder, "")


OUTPUTS: list[Callable[[str], str]] = [
    mask_address,
    shown_url,
    lambda address: load(KAFKA__BOOTSTRAP_SERVERS=address),
    lambda address: load(KAFKA__BOOTSTRAP_SERVERS=f"one:9092,{address}"),
    lambda address: load(KAFKA__SECURITY_PROTOCOL=address),
    lambda address: load(KUBERNETES__URL=address),
    lambda address: load(REMOTE_WRITE__URL=address),
    lambda address: load(ALERTS__URLS=json.dumps([address])),
    lambda address: load(STORE__URI=address),
    lambda address: load(STORE__STORAGE_OPTIONS=json.dumps({address: "x"})),
    lambda address: load(TOKEN_FILE=address),
    lambda address: load(PORTS=json.dumps([address])),
    lambda address: load("--url", address),
    load_key,
]


def refused(option: Callable[[str], object]) -> Callable[[str], str]:
    """Return the error message that a demo prints for an option's value; empty if it is valid."""

    def message(address: str) -> str:
        try:
            option(address)
        except UserError as error:
            return str(error)
        return ""

    return message


OPTIONS: list[Callable[[str], str]] = [
    refused(lambda address: check_url("--remote-write-url", address)),
    refused(lambda address: check_url("--alertmanager-url", address)),
    refused(parse_bus),
    refused(lambda bus: parse_bus(f"kafka://{bus.partition('//')[2]}")),
    refused(lambda bus: parse_bus(f"kafka://one:9092,{bus.partition('//')[2]}")),
    lambda address: load(ALERTS__URLS=address),
    lambda address: load(ALERTS__URLS=f"http://one:9093,{address}"),
]
MANGLED = [
    *(
        f"http://user:{before}{PASSWORD}{at}host{behind}"
        for before in ("", "hun,", "hun/", "hun ", "hun#", "hun?", "h@")
        for at, behind in (("@", ":9093"), ("@", "/api?x=y"), ("%40", ""), ("\uff20", ""))
    ),
    f"http://user:{PASSWORD}",
    f"http://user:{PASSWORD}@",
    f"http://host:9x/?token={PASSWORD}",
    f"https://host:9093/?token=a,{PASSWORD}",
    f"https://host/push?token=abc@{PASSWORD}",
    f"https://tenant/u:{PASSWORD}?x@h.example",
    f"http//user:{PASSWORD}@prom:9090/api/v1/write",
    f"s3:/key:{PASSWORD}@bucket/x",
    f"u;{PASSWORD}@h:9092",
    f"http:/prom:9090/w?token={PASSWORD}",
    f"https:prom:9090/w?token={PASSWORD}",
]


@for_each("address", MANGLED)
def test_no_setting_and_no_option_shows_the_secret_of_a_mangled_address(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # some of them are paths, which the demo creates
    store = refused(lambda given: find_store(Path(given)))
    for at, output in enumerate([*OUTPUTS, *OPTIONS, store]):
        assert PASSWORD not in output(address), at


@pytest.mark.parametrize("address", [*MANGLED, "\\", "a@b"])
@pytest.mark.parametrize("around", ["{}", 'at "{}": refused', "\\{}\\", "\n{}\n"])
def test_a_masked_log_line_is_still_json(address: str, around: str) -> None:
    line = json.dumps({"event": around.format(address), "n": 1})

    assert json.loads(mask_addresses(line))["n"] == 1


@pytest.mark.parametrize(
    "text",
    [
        "did you mean kafka.client_id?",
        "expected a mapping, {name: value}: got a list",
        "node-1.example.org, gpu 3 of pod default/train-0: 5 s; 3 in all",
        "/var/lib/gpuledger/of@somebody#1",
        "cannot read settings file /etc/gpuledger/a;b.yaml: No such file or directory",
        "^(kube|istio)-.*;x",
        "^(?:kube|istio)-.*$",
        "one:9092, [::1]:9092,10.0.0.1:9092",
        "https://host:9090/api/v1/write: refused (see /readyz)",
        "http://[::1]:9090: refused, http://host:9090. And http://host: too",
        "expected `memory` or `kafka://host:port[,host:port…]`",
        "in a user or password write / as %2F, @ as %40, and in a list , as %2C",
    ],
)
def test_a_text_without_an_address_that_may_contain_a_secret_is_shown_unchanged(text: str) -> None:
    assert mask_addresses(text) == text
