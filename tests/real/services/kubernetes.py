"""A real Kubernetes API server with its own etcd.

No kubelet, scheduler or controllers run: the tests play them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from tests.real.services import web
from tests.real.services.certificates import Authority, KeyPair
from tests.real.services.kube_client import KubeApiClient
from tests.real.services.kubeconfig import Cluster, Login, write_kubeconfig
from tests.real.services.ports import free_ports
from tests.real.services.process import Part

if TYPE_CHECKING:
    from collections.abc import Sequence


class Etcd(Part):
    """One etcd member that does not wait for the disk."""

    name = "etcd"

    def __init__(self, *, binary: Path, folder: Path) -> None:
        super().__init__(folder=folder)
        self._binary = binary
        client, self._peer_port = free_ports(2)
        self.url = f"http://127.0.0.1:{client}"

    @override
    def argv(self) -> list[str | Path]:
        peer = f"http://127.0.0.1:{self._peer_port}"
        return [
            self._binary,
            f"--data-dir={self.folder / 'data'}",
            f"--listen-client-urls={self.url}",
            f"--advertise-client-urls={self.url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ]

    @override
    def is_ready(self) -> bool:
        return web.fetch(f"{self.url}/health").status == 200

    def compact(self) -> None:
        """Remove every version except the newest."""
        revision = self._post("/v3/maintenance/status", {})["header"]["revision"]
        self._post("/v3/kv/compaction", {"revision": revision, "physical": True})

    def _post(self, path: str, body: dict[str, object]) -> dict[str, dict[str, str]]:
        answer = web.fetch(self.url + path, method="POST", body=json.dumps(body).encode())
        found: dict[str, dict[str, str]] = answer.json()
        return found


class _ApiServer(Part):
    """The API server's process."""

    name = "kube-apiserver"

    def __init__(
        self,
        *,
        binary: Path,
        folder: Path,
        etcd_url: str,
        arguments: Sequence[str],
        demands_accounts: bool,
    ) -> None:
        super().__init__(folder=folder)
        self._binary = binary
        self._arguments = arguments
        self._etcd_url = etcd_url
        self._disabled = [] if demands_accounts else ["ServiceAccount"]
        self.port = free_ports(1)[0]
        authority = Authority(folder=folder / "certificates")
        self.cluster = Cluster(url=f"https://127.0.0.1:{self.port}", ca_file=authority.certificate)
        self._serving: KeyPair = authority.issue("kube-apiserver")
        self._accounts: KeyPair = authority.issue("service-accounts")
        self.admin = Login(pair=authority.issue("admin", organization="system:masters"))
        self.kubeconfig = write_kubeconfig(
            folder / "admin.kubeconfig", cluster=self.cluster, login=self.admin
        )
        self.client = KubeApiClient(
            cluster=self.cluster, login=self.admin, kubeconfig=self.kubeconfig, folder=folder
        )

    def exchange_certificates(self) -> None:
        """Replace the contents of its certificate files with those of another authority."""
        authority = Authority(folder=self.folder / "other-certificates")
        serving = authority.issue("kube-apiserver")
        admin = authority.issue("admin", organization="system:masters")
        assert self.admin.pair
        for new, old in (
            (authority.certificate, self.cluster.ca_file),
            (serving.certificate, self._serving.certificate),
            (serving.key, self._serving.key),
            (admin.certificate, self.admin.pair.certificate),
            (admin.key, self.admin.pair.key),
        ):
            new.replace(old)

    @override
    def argv(self) -> list[str | Path]:
        return [
            self._binary,
            f"--etcd-servers={self._etcd_url}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.port}",
            f"--tls-cert-file={self._serving.certificate}",
            f"--tls-private-key-file={self._serving.key}",
            f"--client-ca-file={self.cluster.ca_file}",
            f"--service-account-key-file={self._accounts.certificate}",
            f"--service-account-signing-key-file={self._accounts.key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--authorization-mode=Node,RBAC",
            # Otherwise a stopping server waits up to a minute for open watches.
            "--shutdown-watch-termination-grace-period=1s",
            f"--disable-admission-plugins={','.join(self._disabled)}",
            *self._arguments,
        ]

    @override
    def is_ready(self) -> bool:
        return self.client.fetch("GET", "/readyz").body == b"ok"


class KubeApi(KubeApiClient):
    """An API server that the tests own, with its etcd.

    With `demands_accounts` it rejects a pod whose service account is missing, as other clusters do.
    By default it does not, because no controller creates the default account of each namespace
    here.
    """

    def __init__(
        self,
        *,
        apiserver: Path,
        etcd: Path,
        folder: Path,
        arguments: Sequence[str] = (),
        demands_accounts: bool = False,
    ) -> None:
        self.folder = folder
        self.etcd = Etcd(binary=etcd, folder=folder / "etcd")
        self._server = _ApiServer(
            binary=apiserver,
            folder=folder / "apiserver",
            etcd_url=self.etcd.url,
            arguments=arguments,
            demands_accounts=demands_accounts,
        )
        super().__init__(
            cluster=self._server.cluster,
            login=self._server.admin,
            kubeconfig=self._server.kubeconfig,
            folder=folder,
        )

    @property
    def log(self) -> Path:
        """The file with all output of the API server."""
        return self._server.log

    def start(self) -> None:
        """Start or restart both on the same ports and data, and wait until they serve."""
        if not self.etcd.process.is_running():
            self.etcd.start()
        self._server.start()

    def stop(self) -> None:
        """End the API server with SIGTERM, then SIGKILL, and then its etcd."""
        self._server.stop()
        self.etcd.stop()

    def kill(self) -> None:
        """End both with SIGKILL."""
        self._server.kill()
        self.etcd.kill()

    def discard(self) -> None:
        """End both and delete their data; the logs stay."""
        self._server.discard()
        self.etcd.discard()

    def stop_server(self) -> None:
        """End only the API server, as a control plane's restart does; `start` brings it back."""
        self._server.stop()

    def exchange_certificates(self) -> None:
        """Restart the API server with certificates of another authority, including its clients'."""
        self._server.stop()
        self._server.exchange_certificates()
        self._server.start()

    def forget_history(self) -> None:
        """Make lists and watches at every version until now return 410.

        A compaction is not enough: the server answers from its own cache, so it is restarted.
        """
        self.etcd.compact()
        self._server.stop()
        self._server.start()

    def log_tail(self) -> str:
        """Return the end of the API server's log."""
        return self._server.log_tail()
