"""To which tenant of a receiver a series goes: that of its namespace, or the one that all share.

A series is of the namespace of its pod, or of who holds what is idle; devices and nodes are of
none, and neither is what is nobody's. A namespace whose name could be no part of a tenant's is
nobody's, either: names come from records, and a header must not. Pure.
"""

from functools import lru_cache
from typing import Final

from gpuledger.ledger.series import SeriesGroup
from gpuledger_sinks.remote_write.namespace_budgets import namespace_in
from gpuledger_sinks.settings import TenantSettings, is_tenant

ONE_TENANT: Final = ""
"""That of all series, where the receiver is told of no tenants."""


class Tenants:
    """The tenants of one receiver."""

    def __init__(self, settings: TenantSettings | None = None) -> None:
        self._settings = settings or TenantSettings()
        self._tenant_of = lru_cache(maxsize=4096)(self._filled)

    @property
    def are_several(self) -> bool:
        """Whether series go to tenants by their namespaces."""
        return bool(self._settings.of_namespace)

    def tenant_of(self, cluster: str, group: SeriesGroup) -> str:
        """Return to whom a group's series go."""
        if not self.are_several:
            return ONE_TENANT
        namespace = namespace_in(group)
        return self._tenant_of(cluster, namespace) if namespace else self._settings.shared

    def _filled(self, cluster: str, namespace: str) -> str:
        filled = self._settings.of_namespace.format(cluster=cluster, namespace=namespace)
        return filled if is_tenant(filled) else self._settings.shared
