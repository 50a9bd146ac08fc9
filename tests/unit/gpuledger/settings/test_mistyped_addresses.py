"""No output holds the secret of an address, however the address was mistyped."""

import json
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
import yaml
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from gpuledger.errors import SettingsError, UserError
from gpuledger.settings import KafkaSettings, Secret, load_settings
from gpuledger.settings.secret import mask_address, mask_addresses, shown_url
from gpuledger_cli.demo.plan import check_url, find_store, parse_bus
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings
from gpuledger_sinks.settings import AlertsSettings, RemoteWriteSettings, StoreSettings

PASSWORD = "S3cr3t"
TOKEN = "t0k3n"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kafka: KafkaSettings = KafkaSettings()
    kubernetes: KubernetesSettings = KubernetesSettings()
    remote_write: RemoteWriteSettings = RemoteWriteSettings()
    alerts: AlertsSettings = AlertsSettings()
    store: StoreSettings = StoreSettings()
    token: Secret | None = None
    ports: list[int] = []


def load(*argv: str, **variables: str) -> str:
    """Return all that is shown of the settings, or of the mistake in them."""
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
    """Return what is said where the address stands as a key of the settings file."""
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
    """Return what a demo says where an option's value is none; nothing where it is taken."""

    def said(address: str) -> str:
        try:
            option(address)
        except UserError as error:
            return str(error)
        return ""

    return said


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
        f"{scheme}user:{before}{PASSWORD}{at}host{behind}"
        for scheme in ("http://", "https://")
        for before in ("", "hun,", "hun/", "hun ", "hun#", "hun?", "h@")
        for at in ("@", "%40", "\uff20", "\ufe6b")
        for behind in ("", ":9093", ":909x/", "/api?x=y")
    ),
    f"http://user:{PASSWORD}",
    f"http://user:{PASSWORD}@",
    f"http://user:{PASSWORD}/x",
    f"http://host:9x/?token={PASSWORD}",
    f"https://host:9093/?token=a,{PASSWORD}",
    f"https://host/push?token=abc@{PASSWORD}",
    f"https://host/push#abc@{PASSWORD}",
    f"https://tenant/u:{PASSWORD}?x@h.example",
]


@pytest.mark.parametrize("address", MANGLED)
def test_no_setting_and_no_option_says_the_secret_of_an_address_that_is_mangled(
    address: str,
) -> None:
    store = refused(lambda given: find_store(Path(given)))
    for at, output in enumerate([*OUTPUTS, *OPTIONS, store]):
        assert PASSWORD not in output(address), at


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(data=st.data(), mangled=st.sampled_from(MANGLED))
def test_no_option_says_the_secret_of_an_address_mangled_in_any_other_place(
    data: st.DataObject, mangled: str
) -> None:
    at = data.draw(st.integers(0, mangled.index(PASSWORD)))
    wrong = data.draw(st.sampled_from([*":/ @?#,;%[]'\"", "%40", "//", "\t", "\uff20"]))
    address = f"{mangled[:at]}{wrong}{mangled[at:]}"
    assume(address.partition("://")[1] and hidden_in(address))

    for at, output in enumerate([shown_url, mask_address, *OPTIONS]):
        assert PASSWORD not in output(address), at


@st.composite
def mistyped(draw: st.DrawFn) -> str:
    """Return an address with user, password or token, one or two characters of it mistyped."""
    scheme = draw(st.sampled_from(["http://", "https://", "s3://", ""]))
    user = draw(st.sampled_from([f"user:{PASSWORD}@", f"{PASSWORD}@", ""]))
    host = draw(st.sampled_from(["prom:9090", "prom", "10.0.0.1:9092", "[::1]:9090"]))
    path = draw(st.sampled_from(["", "/", "/api/v1/write"]))
    query = draw(st.sampled_from([f"{sign}token={TOKEN}" for sign in "?#;"] + [""]))
    address = f"{scheme}{user}{host}{path}{query}"
    for _ in range(draw(st.integers(0, 2))):
        places = [at for at, sign in enumerate(address) if sign in ":/@? ;#"] or [0]
        at = draw(st.sampled_from(places))
        wrong = draw(st.sampled_from(["", address[at] * 2, *":/; @#?,'\"", "//", "\t"]))
        if draw(st.booleans()):
            address = f"{address[:at]}{wrong}{address[at + 1 :]}"
        else:
            at += draw(st.integers(0, 1))
            address = f"{address[:at]}{wrong}{address[at:]}"
    return address


def hidden_in(address: str) -> list[str]:
    """Return which secrets of the address its signs still tell, so that none may be shown."""
    hidden = [PASSWORD] if "@" in address.partition(PASSWORD)[2] else []
    before, found, _ = address.partition(TOKEN)
    if found and any(sign in before for sign in "?#;") and set(address) & set("/@"):
        hidden.append(TOKEN)
    return hidden


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(address=mistyped())
@example(address="http//user:S3cr3t@prom:9090/api/v1/write")
@example(address="s3//key:S3cr3t@bucket/x")
@example(address="u;S3cr3t@h:9092")
@example(address="http:/prom:9090/w?token=t0k3n")
@example(address="https:prom:9090/w?token=t0k3n")
@example(address="http//user:S3cr3t@h:9090/x:")
def test_no_output_holds_a_secret_of_a_mistyped_address(address: str) -> None:
    hidden = hidden_in(address)
    assume(hidden)

    for at, output in enumerate(OUTPUTS):
        shown = output(address)
        assert not [secret for secret in hidden if secret in shown], (at, shown)


@settings(max_examples=300, deadline=None)
@given(address=mistyped(), around=st.sampled_from(["{}", "at {}: refused", "a={} b", "({})"]))
def test_no_word_of_a_log_line_holds_a_secret_of_a_mistyped_address(
    address: str, around: str
) -> None:
    assume(not set(address) & set(" \t'\""))  # where it ends is not known then

    shown = mask_addresses(around.format(address))

    assert not [secret for secret in hidden_in(address) if secret in shown]


@settings(max_examples=200, deadline=None)
@given(address=mistyped(), around=st.sampled_from(["{}", 'at "{}": refused', "\\{}\\", "\n{}\n"]))
def test_a_log_line_that_is_masked_is_json_still(address: str, around: str) -> None:
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
def test_a_text_without_an_address_that_may_hold_a_secret_is_shown_as_it_is(text: str) -> None:
    assert mask_addresses(text) == text
