"""Writes the file by which a Kubernetes client finds the simulator's API server.

Nothing else lives here.
"""

from pathlib import Path

import yaml


def write_kubeconfig(path: Path, url: str) -> None:
    """Write a kubeconfig with one cluster, one context and a user without credentials."""
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "simulated", "cluster": {"server": url}}],
        "users": [{"name": "reader", "user": {}}],
        "contexts": [{"name": "simulated", "context": {"cluster": "simulated", "user": "reader"}}],
        "current-context": "simulated",
    }
    path.write_text(yaml.safe_dump(content, sort_keys=False))
