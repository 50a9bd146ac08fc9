"""A kubeconfig is used as kubectl uses it; what cannot be used is refused, and nobody waits."""

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from gpuledger.runtime.readiness import Check
from gpuledger_enricher.podwatch.api import Api, KubernetesError
from gpuledger_enricher.podwatch.client import Client
from gpuledger_enricher.podwatch.kubeconfig import LOGIN, load_configuration
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings
from tests.errors import has_words
from tests.fakes.seconds import Seconds
from tests.hanging import HANG_SECONDS
from tests.unit.enricher.podwatch.builders import soon, write_kubeconfig
from tests.unit.enricher.podwatch.misbehaving import MisbehavingServer

SECRET = "tok-hunter2-4711"
API_VERSION = "client.authentication.k8s.io/v1"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kubeconfig"


def write(file: Path, user: object, *, url: str = "http://127.0.0.1:9") -> None:
    """Write a kubeconfig with this user."""
    document = yaml.safe_load(write_kubeconfig(file, url=url, token="").read_text())
    document["users"][0]["user"] = user
    file.write_text(json.dumps(document))


def named(file: Path) -> KubernetesSettings:
    return KubernetesSettings(kubeconfig=str(file))


async def login_of(file: Path, *, timeout_seconds: float = HANG_SECONDS) -> str:
    """Return what would be sent as `Authorization`."""
    configuration = await load_configuration(
        files=[file], context="", in_cluster=False, timeout_seconds=timeout_seconds
    )
    return str(configuration.api_key.get(LOGIN, ""))


@pytest.mark.parametrize("end", ["", "\n", "\r\n", " \n"])
@pytest.mark.parametrize("where", ["token", "tokenFile"])
async def test_the_end_of_a_tokens_line_is_no_part_of_it(file: Path, where: str, end: str) -> None:
    if where == "tokenFile":
        file.with_name("token").write_bytes(f"{SECRET}{end}".encode())
        write(file, {"tokenFile": "token", "token": "the file goes first"})
    else:
        write(file, {"token": f"{SECRET}{end}"})
    assert await login_of(file) == f"Bearer {SECRET}"


def plugin(file: Path, script: str, *, arguments: tuple[str, ...] = ()) -> dict[str, object]:
    """Return a user whose token comes from a script beside the kubeconfig."""
    program = file.with_name("plugin")
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    called = {"apiVersion": API_VERSION, "command": str(program), "args": list(arguments)}
    return {"exec": called}


async def test_a_token_of_googles_former_provider_is_used(file: Path) -> None:
    answer = {"credential": {"access_token": SECRET, "token_expiry": "2030-01-01T00:00:00Z"}}
    plugin(file, saying(answer))
    config = {"cmd-path": str(file.with_name("plugin")), "cmd-args": "config"}
    write(file, {"auth-provider": {"name": "gcp", "config": config}})
    assert await login_of(file) == f"Bearer {SECRET}"


def saying(answer: object) -> str:
    return f"cat <<'END'\n{json.dumps(answer)}\nEND"


def granting(token: object) -> str:
    return saying({"apiVersion": API_VERSION, "kind": "x", "status": {"token": token}})


async def test_a_plugins_token_is_used_and_its_line_end_is_not(file: Path) -> None:
    write(file, plugin(file, granting(f"{SECRET}\n")))
    assert await login_of(file) == f"Bearer {SECRET}"


USERS: dict[str, object] = {
    "a token that is a list": {"token": [SECRET]},
    "a token that is a number": {"token": 4711},
    "a line end within a token": {"token": f"bad\nX: {SECRET}"},
    "an empty token": {"token": ""},
    "no login": {},
    "no user section": None,
    "a text for a user": SECRET,
    "a file of a token that is not there": {"tokenFile": "/nowhere/token"},
    "a device for a token": {"tokenFile": "/dev/zero"},
    "an identity provider of no kind": {
        "auth-provider": {"name": "oidc", "config": {"id-token": SECRET}}
    },
    "arguments that are none": {"exec": {"apiVersion": "v1", "command": "true", "args": SECRET}},
    "a plug-in that is not there": {"exec": {"apiVersion": "v1", "command": "/nowhere/plug-in"}},
}
SCRIPTS: dict[str, str] = {
    "a plug-in that fails": f"echo 'token {SECRET} expired' >&2; exit 3",
    "a plug-in that breaks off": f'printf \'{{"status": {{"token": "{SECRET}\'',
    "another apiVersion": saying({"apiVersion": SECRET, "kind": "x", "status": {"token": "x"}}),
    "a list": saying([SECRET]),
    "a status that is a text": saying({"apiVersion": API_VERSION, "kind": "x", "status": SECRET}),
    "a plug-in's token with a line end": granting(f"{SECRET}\nX"),
    "a plug-in's empty token": granting(" "),
    "a plug-in's token that is a list": granting([SECRET]),
    "a status without a token": saying(
        {"apiVersion": API_VERSION, "kind": "x", "status": {"tokn": SECRET}}
    ),
    "a plug-in that does not end to write": f"yes {SECRET}",
}
FILES: dict[str, str] = {
    "half a file": "{",
    "an empty file": "",
    "an alias": f"users: [{{name: u, user: {{token: *{SECRET}}}}}]",
    "a tag": f"users: [{{name: u, user: {{token: !{SECRET} x}}}}]",
    "a percent sign": f"users: [{{name: u, user: {{token: %{SECRET}}}}}]",
    "two colons": f"token: a: {SECRET}",
    "another context": f"current-context: {SECRET}\ncontexts: []",
    "a name that is none": f"users: [{{name: [{SECRET}]}}]",
    "no lists": f"users: {SECRET}",
    "no kubeconfig": SECRET,
}


SERVERS: dict[str, str] = {
    "a server that is none": f"ht!tp://u:{SECRET}@h",
    "a user in the server's address": f"http://u:{SECRET}@h",
}


def spoil(file: Path, what: str, *, url: str) -> None:
    """Change a kubeconfig into what cannot be used."""
    if what in USERS:
        write(file, USERS[what], url=url)
    elif what in SCRIPTS:
        write(file, plugin(file, SCRIPTS[what], arguments=(SECRET,)), url=url)
    elif what in FILES:
        file.write_text(FILES[what])
    elif what == "a FIFO":
        file.unlink()
        os.mkfifo(file)
    else:
        write(file, {"token": SECRET}, url=SERVERS[what])


@pytest.mark.parametrize("what", [*USERS, *SCRIPTS, *FILES, *SERVERS, "a FIFO"])
async def test_what_cannot_be_used_leaves_the_former_in_force_and_is_said_without_a_secret(
    what: str, server: MisbehavingServer, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, check = Seconds(), Check()
    write(file, {"token": "first"}, url=server.url)
    client = await Client.open(named(file), check=check, monotonic=clock)
    spoil(file, what, url=server.url)
    clock.advance(1.0)
    await list_pods(client)
    await client.close()
    assert server.tokens == ["Bearer first"]
    assert check.has_failed
    assert "the former credentials stay in force" in check.detail
    assert "4711" not in f"{check.detail} {caplog.text}"


async def test_a_plugin_that_hangs_holds_up_no_request_and_ends_with_podwatch(
    server: MisbehavingServer, file: Path
) -> None:
    clock, check, pid_file = Seconds(), Check(), file.with_name("pid")
    write(file, {"token": "first"}, url=server.url)
    client = await Client.open(
        named(file), check=check, monotonic=clock, refresh_timeout_seconds=0.1
    )
    write(file, plugin(file, f"sleep 1000 & echo $! > {pid_file}; wait"), url=server.url)
    clock.advance(1.0)
    async with asyncio.timeout(HANG_SECONDS):
        for _ in range(3):
            await list_pods(client)
        assert server.tokens == ["Bearer first"] * 3
        assert check.has_failed
        clock.advance(7.0)
        assert "being read for 7 s" in check.detail
        await soon(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"))
        await client.close()
        await soon(lambda: not is_alive(int(pid_file.read_text())))


@pytest.mark.parametrize("kind", ["exec", "auth-provider"])
async def test_a_plugin_that_hangs_is_given_up_with_its_children(file: Path, kind: str) -> None:
    pid_file = file.with_name("pid")
    user = plugin(file, f"sleep 1000 & echo $! > {pid_file}; wait")
    program = str(file.with_name("plugin"))
    google = {"name": "gcp", "config": {"cmd-path": program, "cmd-args": "--x"}}
    write(file, user if kind == "exec" else {"auth-provider": google})
    with pytest.raises(KubernetesError, check=has_words("0.5 s")):
        await login_of(file, timeout_seconds=0.5)
    await soon(lambda: not is_alive(int(pid_file.read_text())))


def is_alive(pid: int) -> bool:
    """Return whether a process runs: one that has ended may wait for its parent to hear of it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def list_pods(api: Api, query: Mapping[str, str] | None = None) -> bytes:
    async with api.get(
        "/api/v1/pods", query=query or {}, idle_timeout_seconds=5.0, total_seconds=5.0
    ) as answer:
        return await answer.read(max_bytes=10_000)
