"""A Kubernetes API server that serves a scenario over HTTP."""

from gpuledger_simulator.kube.server import KubeApi, serve_kube_api, write_kubeconfig

__all__ = ["KubeApi", "serve_kube_api", "write_kubeconfig"]
