"""A node of a cluster: a real kubelet and containerd with real containers, as root.

There are no GPUs: a device plugin offers only their ids.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from typing_extensions import override

from tests.real.services import web
from tests.real.services.image import NAME as IMAGE
from tests.real.services.image import write_image
from tests.real.services.ports import free_ports
from tests.real.services.process import RECHECK_SECONDS, Part

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.real.services.kube_client import KubeApiClient
    from tests.real.services.kubernetes import KubeApi

NODE = "real-0"
RESOURCE = "nvidia.com/gpu"
DRIVER = "gpu.nvidia.com"
CONTAINER_LOGS = Path("/var/log/containers")
"""Links to the containers' logs; no setting of the kubelet changes this path."""
KUBELET_FILES = Path("/var/lib/kubelet")
"""The kubelet's default root. The sockets of device plugins are always here."""
CGROUPS = Path("/sys/fs/cgroup")
CLEAN_SECONDS = 30.0
"""How long killed containers may take to end."""


class Containerd(Part):
    """A container runtime that shares no directory or socket with another one on this machine."""

    name = "containerd"

    def __init__(self, *, programs: Mapping[str, Path], folder: Path, home: Path) -> None:
        super().__init__(folder=folder)
        self._programs, self._home = programs, home
        self.socket = home / "containerd.sock"
        self._config = home / "containerd.toml"
        conflist = home / "cni" / "none.conflist"
        conflist.parent.mkdir()
        # The pods use the network of the node. Without a configured network, the node is not ready.
        network = {"cniVersion": "0.4.0", "name": "none", "plugins": [{"type": "none"}]}
        conflist.write_text(json.dumps(network))
        cri = '[plugins."io.containerd.grpc.v1.cri"'
        self._config.write_text(
            f'version = 2\nroot = "{home}/images"\nstate = "{home}/state"\n'
            f'[grpc]\naddress = "{self.socket}"\n'
            f'{cri}]\nsandbox_image = "{IMAGE}"\n'
            # In a container, root may lack CAP_SYS_RESOURCE.
            "restrict_oom_score_adj = true\n"
            f'{cri}.cni]\nconf_dir = "{conflist.parent}"\n'
        )

    @override
    def argv(self) -> list[str | Path]:
        return [self._programs["containerd"], "--config", self._config]

    @override
    def is_ready(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(self.socket))
        return True

    def import_image(self, archive: Path) -> None:
        """Import an image, so that the kubelet can start containers from it."""
        argv: list[str | Path] = [
            self._programs["ctr"],
            "--address",
            self.socket,
            "--namespace",
            "k8s.io",
        ]
        argv += ["images", "import", archive]
        subprocess.run(argv, capture_output=True, check=True)


class Kubelet(Part):
    """The kubelet of the node."""

    name = "kubelet"

    def __init__(
        self, *, binary: Path, folder: Path, home: Path, runtime: Path, kube_api: KubeApiClient
    ) -> None:
        super().__init__(folder=folder)
        self.port, self._health_port = free_ports(2)
        self._binary, self._home, self._kubeconfig = binary, home, kube_api.kubeconfig
        self.root = home / "kubelet"
        self.certificate = home / "certificates" / "kubelet.crt"
        self.static_pods = home / "static"
        self.pod_logs = home / "logs"
        self.static_pods.mkdir()
        self._config = home / "kubelet.yaml"
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "failCgroupV1": False,
            "failSwapOn": False,
            "cgroupDriver": "cgroupfs",
            "containerRuntimeEndpoint": f"unix://{runtime}",
            "address": "127.0.0.1",
            "port": self.port,
            "healthzPort": self._health_port,
            "authentication": {"x509": {"clientCAFile": str(kube_api.ca_file)}},
            "authorization": {"webhook": {"cacheUnauthorizedTTL": "1s"}},
            "enforceNodeAllocatable": [],
            "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0.1%"},
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "localStorageCapacityIsolation": False,
            "makeIPTablesUtilChains": False,
            "resolvConf": "",
            "podLogsDir": str(self.pod_logs),
            "staticPodPath": str(self.static_pods),
            "fileCheckFrequency": "1s",
            "nodeStatusUpdateFrequency": "2s",
        }
        self._config.write_text(yaml.safe_dump(config))

    @property
    def socket(self) -> Path:
        """The socket of its pod-resources API."""
        return self.root / "pod-resources" / "kubelet.sock"

    @override
    def argv(self) -> list[str | Path]:
        return [
            self._binary,
            f"--config={self._config}",
            f"--kubeconfig={self._kubeconfig}",
            f"--root-dir={self.root}",
            f"--cert-dir={self.certificate.parent}",
            f"--hostname-override={NODE}",
        ]

    @override
    def is_ready(self) -> bool:
        return web.fetch(f"http://127.0.0.1:{self._health_port}/healthz").body == b"ok"


class DevicePlugin(Part):
    """A plugin that offers ids as GPUs, and gives them to containers as NVIDIA's plugin does."""

    name = "device-plugin"

    def __init__(self, *, binary: Path, folder: Path, ids: Sequence[str]) -> None:
        super().__init__(folder=folder)
        self._binary, self._ids = binary, ids

    @override
    def argv(self) -> list[str | Path]:
        return [self._binary, RESOURCE, *self._ids]

    @override
    def is_ready(self) -> bool:
        return "registered" in self.log_tail()


class DraDriver(Part):
    """The kubelet plugin of a DRA driver, with one GPU."""

    name = "dra-driver"

    def __init__(self, *, binary: Path, folder: Path, root: Path, device: str) -> None:
        super().__init__(folder=folder)
        self._binary, self._root, self._device = binary, root, device

    @override
    def argv(self) -> list[str | Path]:
        return [self._binary, self._root, DRIVER, NODE, self._device]

    @override
    def is_ready(self) -> bool:
        return "registered" in self.log_tail()


class Scheduler(Part):
    """The scheduler, which also allocates the devices of resource claims."""

    name = "kube-scheduler"

    def __init__(self, *, binary: Path, folder: Path, kube_api: KubeApiClient) -> None:
        super().__init__(folder=folder)
        self._binary, self._kubeconfig = binary, kube_api.kubeconfig

    @override
    def argv(self) -> list[str | Path]:
        kubeconfig = f"--kubeconfig={self._kubeconfig}"
        return [self._binary, kubeconfig, "--leader-elect=false", "--secure-port=0"]

    @override
    def is_ready(self) -> bool:
        return True


class KubeletNode:
    """The node. A machine can have only one, and must not be a node of another cluster."""

    def __init__(
        self,
        *,
        programs: Mapping[str, Path],
        folder: Path,
        kube_api: KubeApi,
        gpu_uuids: Sequence[str],
    ) -> None:
        self.kube_api, self._programs = kube_api, programs
        # The path of a socket has at most 107 bytes, and the paths of pytest's folders are long.
        self._home = Path(tempfile.mkdtemp(prefix="node-"))
        self.containerd = Containerd(programs=programs, folder=folder, home=self._home)
        self.kubelet = Kubelet(
            binary=programs["node-kubelet"],
            folder=folder,
            home=self._home,
            runtime=self.containerd.socket,
            kube_api=kube_api,
        )
        self.device_plugin = DevicePlugin(
            binary=programs["device-plugin"], folder=folder, ids=gpu_uuids
        )

    def start(self) -> None:
        """Start everything, and wait until the node has its GPUs."""
        assert not KUBELET_FILES.exists(), f"{KUBELET_FILES}: this machine has a kubelet"
        self.containerd.start()
        image = self._home / "image.tar"
        write_image(image, busybox=self._programs["busybox"])
        self.containerd.import_image(image)
        self.kubelet.start()
        self.device_plugin.start()
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Wait until the node is ready and has its GPUs."""
        self.kubelet.process.wait_until(self._is_ready, deadline_seconds=60)

    def discard(self) -> None:
        """Kill everything, and remove what it left on the machine."""
        for part in (self.device_plugin, self.kubelet, self.containerd):
            part.kill()
        cgroups = [*CGROUPS.glob("kubepods"), *CGROUPS.glob("*/kubepods")]
        self._kill_containers(cgroups)
        for root in cgroups:
            for folder, _, _ in os.walk(root, topdown=False):
                Path(folder).rmdir()
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            mounted = line.split()[1]
            if Path(mounted).is_relative_to(self._home):
                subprocess.run(["/usr/bin/umount", mounted], check=True)
        for link in CONTAINER_LOGS.glob("*.log"):
            if link.readlink().is_relative_to(self._home):
                link.unlink()
        for home in (self._home, KUBELET_FILES):
            shutil.rmtree(home)

    def _kill_containers(self, cgroups: Sequence[Path]) -> None:
        end_seconds = time.monotonic() + CLEAN_SECONDS
        while pids := self._shims() | _processes_in(cgroups):
            assert time.monotonic() < end_seconds, pids
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(RECHECK_SECONDS)

    def _shims(self) -> set[int]:
        """Return the processes between containerd and its containers; they outlive containerd."""
        address = f"\0{self.containerd.socket}\0".encode()
        return {
            int(process.name)
            for process in Path("/proc").glob("[0-9]*")
            if address in read_or_empty(process / "cmdline")
        }

    def _is_ready(self) -> bool:
        status, node = self.kube_api.request("GET", f"/api/v1/nodes/{NODE}")
        if status != 200 or not int(node["status"].get("allocatable", {}).get(RESOURCE, 0)):
            return False
        return any(
            one["type"] == "Ready" and one["status"] == "True"
            for one in node["status"]["conditions"]
        )


def find_cgroups(name: str) -> list[Path]:
    """Return the folders of a pod's or a container's cgroup, in one hierarchy."""
    return [found for root in ("", "pids/") for found in CGROUPS.glob(f"{root}kubepods/**/{name}")]


def read_or_empty(path: Path) -> bytes:
    """Return a file's content; empty if it cannot be read, such as after its process has ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _processes_in(cgroups: Sequence[Path]) -> set[int]:
    # os.walk skips cgroups that disappear meanwhile; Path.rglob raises an error.
    files = (Path(folder, "cgroup.procs") for root in cgroups for folder, _, _ in os.walk(root))
    return {int(pid) for file in files for pid in read_or_empty(file).split()}
