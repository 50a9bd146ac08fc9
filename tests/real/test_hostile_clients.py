"""Whatever clients do to an agent's HTTP endpoints, probes and scrapers are answered.

The agent represents every component: all of them have the same HTTP server.
"""

from __future__ import annotations

import socket
import ssl
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import bcrypt
import pytest

from tests.real.end_to_end.components import Component
from tests.real.services import web
from tests.real.services.certificates import Authority

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 2**20
SECONDS = 20.0
USERS = f'basic_auth_users: {{alice: "{bcrypt.hashpw(b"right", bcrypt.gensalt(4)).decode()}"}}\n'
TLS = "tls_server_config: {cert_file: server.pem, key_file: server-key.pem%s}\n"
CLIENTS = ", client_auth_type: %s, client_ca_file: ca.pem"
GET = b"GET /metrics HTTP/1.1\r\nHost: a\r\n"
CLOSED = b"Connection: close\r\n\r\n"


class Agent(Component):
    """One agent, with a web configuration unless its text is empty."""

    def __init__(self, folder: Path, text: str) -> None:
        self.web_config = folder / "web.yml"
        self.web_config.write_text(text)
        web_config = {"HTTP__WEB_CONFIG_FILE": str(self.web_config)} if text else {}
        super().__init__(
            name="agent",
            command=["gpuledger", "agent", "--no-kafka", "--source", "simulated"],
            folder=folder,
            environment=web_config,
        )
        host, _, port = self.health.removeprefix("http://").partition(":")
        self.address = (host, int(port))

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        """Connect from an address of the loopback network."""
        return socket.create_connection(self.address, SECONDS, source_address=(source, 0))

    def answering(self) -> list[int]:
        """Return the agent once it listens."""
        with suppress(OSError), self.connect():
            return [1]
        return []

    def send(self, request: bytes, *, source: str = "127.0.0.1") -> bytes:
        """Send bytes over a new connection; return everything received until it ends."""
        with self.connect(source) as plain:
            plain.sendall(request)
            pieces = []
            while piece := plain.recv(65_536):
                pieces.append(piece)
        return b"".join(pieces)

    def status(self, request: bytes) -> int:
        """Return only the status line of the response to these bytes."""
        return int(self.send(request).split()[1])

    def resident_bytes(self) -> int:
        """Return the process's current memory."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))

    def change(self, text: str, *, until: Callable[[], bool]) -> None:
        """Change the web configuration, and wait until the agent notices."""
        self.web_config.write_text(text)
        web.await_some(lambda: [1] if until() else [], what=text, deadline_seconds=SECONDS)

    def s_client(self, *arguments: str, page: str = "/metrics") -> str:
        """Fetch a page with OpenSSL's client; return its full output."""
        host, port = self.address
        argv = ["openssl", "s_client", "-connect", f"{host}:{port}", "-ign_eof", *arguments]
        request = f"GET {page} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode()
        done = subprocess.run(argv, input=request, capture_output=True, timeout=120, check=False)
        return (done.stdout + done.stderr).decode(errors="replace")


@pytest.fixture
def start_agent(tmp_path: Path) -> Iterator[Callable[[str], Agent]]:
    with ExitStack() as stack:

        def start(text: str) -> Agent:
            authority = Authority(folder=tmp_path)
            authority.issue("server")
            authority.issue("prometheus")
            agent = Agent(tmp_path, text)
            agent.start()
            stack.callback(agent.kill)
            web.await_some(agent.answering, what="the agent", deadline_seconds=120)
            return agent

        yield start


@pytest.mark.parametrize("sources", [pytest.param(1, marks=pytest.mark.extended), 5])
def test_hundreds_of_idle_connections_leave_probes_and_scrapes_answered(
    start_agent: Callable[[str], Agent], sources: int
) -> None:
    agent = start_agent("")
    with ExitStack() as stack:
        for number in range(300):
            idle = stack.enter_context(agent.connect(f"127.0.0.{2 + number % sources}"))
            idle.sendall(b"GET /metrics HTTP/1.1\r\n" if number % 2 else b"")
        for source in ("127.0.0.2", "127.0.0.99"):
            livez = b"GET /livez HTTP/1.1\r\nHost: a\r\n" + CLOSED
            assert agent.send(livez, source=source).endswith(b"\r\n\r\nok\n")
    assert agent.stop() == 0, agent.log_tail()


@pytest.mark.parametrize(
    "hello",
    [True, pytest.param(False, marks=pytest.mark.extended)],
    ids=["half a handshake", "nothing"],
)
def test_a_thousand_incomplete_handshakes_take_little_memory(
    start_agent: Callable[[str], Agent],
    hello: bool,  # noqa: FBT001  # a column of the table
) -> None:
    agent = start_agent(TLS % "")
    assert "200 OK" in agent.s_client("-quiet", page="/livez")
    before_bytes = agent.resident_bytes()
    sent = client_hello() if hello else b""
    with ExitStack() as stack:
        for number in range(1000):
            half = stack.enter_context(agent.connect(f"127.0.0.{2 + number % 20}"))
            half.sendall(sent)
        growth_bytes = agent.resident_bytes() - before_bytes
        assert "200 OK" in agent.s_client("-quiet", page="/livez")
    assert growth_bytes < 24 * MIB


def test_a_login_that_is_not_ascii_is_rejected_as_wrong(
    start_agent: Callable[[str], Agent],
) -> None:
    agent = start_agent(USERS)
    for login in (b"Basic \xc3\xa9\xc3\xa9", b"Basic \xff", b"\xfe", b"Basic YWxpY2U6d3Jvbmc="):
        assert agent.status(GET + b"Authorization: " + login + b"\r\n" + CLOSED) == 401
    assert agent.status(GET + b"Authorization: Basic YWxpY2U6cmlnaHQ=\r\n" + CLOSED) == 200
    assert agent.stop() == 0, agent.log_tail()
    assert "Traceback" not in agent.log.read_text()


def test_a_change_of_the_web_configuration_takes_effect_as_a_whole(
    start_agent: Callable[[str], Agent],
) -> None:
    """The minimum version, whether client certificates are required, and their allowed names."""
    agent = start_agent(TLS % "")
    folder = agent.web_config.parent
    pair = ("-cert", str(folder / "prometheus.pem"), "-key", str(folder / "prometheus-key.pem"))
    assert "200 OK" in agent.s_client("-tls1_2", "-quiet")

    agent.change(
        TLS % ", min_version: TLS13",
        until=lambda: "200 OK" not in agent.s_client("-tls1_2", "-quiet"),
    )
    assert "200 OK" in agent.s_client("-tls1_3", "-quiet")

    if_given = CLIENTS % "VerifyClientCertIfGiven" + ", client_allowed_sans: [elsewhere]"
    agent.change(TLS % if_given, until=lambda: "403 Forbidden" in agent.s_client("-quiet", *pair))
    assert "200 OK" in agent.s_client("-quiet")

    required = CLIENTS % "RequireAndVerifyClientCert"
    agent.change(TLS % required, until=lambda: "403 Forbidden" in agent.s_client("-quiet"))
    assert "200 OK" in agent.s_client("-quiet", *pair)
    assert agent.stop() == 0, agent.log_tail()


def client_hello() -> bytes:
    """Return the first message of a client that goes no further."""
    context = ssl.create_default_context()
    outgoing = ssl.MemoryBIO()
    half = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        half.do_handshake()
    return outgoing.read()
