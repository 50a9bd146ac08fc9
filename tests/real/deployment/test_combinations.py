"""Components combined in any order: either both are complete, or the build fails."""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING, Final

import pytest
import yaml

from tests.real.deployment.installation import copy_of_k8s
from tests.real.deployment.rendering import Manifest, kustomizations, render, strings
from tests.real.services.kustomize import KustomizeError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.real.deployment.rendering import Rendering
    from tests.real.services.kustomize import Kustomize

TLS: Final = "components/pages-tls"
COMPONENTS: Final = sorted(
    set(filter(lambda folder: folder.startswith("components/"), kustomizations(kind="Component")))
    - {"components/kafka", "components/before-pages-tls"}
)
"""The components that an overlay over the base accepts."""


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    """Return the directory of an overlay to be written, in a copy of k8s/."""
    folder = copy_of_k8s(tmp_path) / "overlays" / "pair"
    folder.mkdir()
    return folder


def rendered(overlay: Path, components: tuple[str, ...]) -> Rendering:
    """Return the base with these components; raises KustomizeError."""
    listed = [f"../../{name}" for name in components]
    made = {"resources": ["../../base"], "components": listed}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(made))
    return render(overlay)


def brings_pages(overlay: Path, component: str) -> bool:
    """Return whether a component has a continuously running workload, and so HTTP endpoints."""
    return len(rendered(overlay, (component,)).services()) > len(rendered(overlay, ()).services())


def message(made: Manifest) -> list[tuple[str, str]]:
    """Return an object's full content, whatever the order of its lists."""
    return sorted(strings(made))


@pytest.mark.parametrize(
    "first",
    [pytest.param(one, marks=[] if one == TLS else pytest.mark.extended) for one in COMPONENTS],
)
def test_two_components_render_the_same_in_both_orders_or_pages_tls_is_rejected_in_front(
    first: str, kustomize: Kustomize, overlay: Path
) -> None:
    for pair in permutations(COMPONENTS, 2):
        if pair[0] != first:
            continue
        if first == TLS and brings_pages(overlay, pair[1]):
            with pytest.raises(KustomizeError, match=r"before-pages-tls.*scheme failed"):
                rendered(overlay, pair)
        elif not (pair[1] == TLS and brings_pages(overlay, first)):
            one, other = rendered(overlay, pair), rendered(overlay, pair[::-1])
            assert sorted(map(message, one.objects)) == sorted(map(message, other.objects))


@pytest.mark.parametrize("component", [one for one in COMPONENTS if one != TLS])
def test_no_workload_is_without_tls_if_pages_tls_comes_last(
    component: str, kustomize: Kustomize, overlay: Path
) -> None:
    for workload in rendered(overlay, (component, TLS)).services():
        assert "GPULEDGER_HTTP__WEB_CONFIG_FILE" in {
            variable["name"] for variable in workload.container["env"]
        }
        assert workload.container["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
