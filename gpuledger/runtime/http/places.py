"""Who may hold one of few places: a newcomer displaces who waits on its client longest. Pure.

A place is held by who works, who must be left to it, or by who waits: for a client to send, or to
take what it asked for. Nobody who waits is worth more than who comes next, which may be a probe.
One address may hold so many and no more; where all places are taken, one of the address that holds
the most is given up, so that a flood displaces itself first.
"""

import socket
from collections import Counter
from typing import Final, Generic, TypeVar

H = TypeVar("H")
_IPV6_NETWORK_BYTES: Final = 8


class Places(Generic[H]):
    """The places of one kind, and their holders."""

    def __init__(self, *, max_total: int, max_per_address: int) -> None:
        self._max_total = max_total
        self._max_per_address = max_per_address
        self._addresses: dict[H, str] = {}
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, dict[H, None]] = {}

    def __len__(self) -> int:
        """Return how many are held."""
        return len(self._addresses)

    def find_displaced(self, address: str) -> H | None:
        """Return who has to go so that a newcomer from there has a place; nobody where one is free.

        Raises LookupError where all of those who could go are at work.
        """
        if self._held[address] >= self._max_per_address:
            busiest = address
        elif len(self._addresses) >= self._max_total:
            busiest = max(self._waiting, key=self._held.__getitem__, default=address)
        else:
            return None
        longest = next(iter(self._waiting.get(busiest, ())), None)
        if longest is None:
            raise LookupError("nobody waits")
        return longest

    def enter(self, holder: H, address: str) -> None:
        """Return it a place, where it waits from now on."""
        self._addresses[holder] = address
        self._held[address] += 1
        self.wait(holder)

    def wait(self, holder: H) -> None:
        """Record that it waits on its client from now on, where it has a place still."""
        if (address := self._addresses.get(holder)) is not None:
            self._stop_waiting(holder, address)
            self._waiting.setdefault(address, {})[holder] = None

    def work(self, holder: H) -> None:
        """Record that it works and is to be left to it, where it has a place still."""
        if (address := self._addresses.get(holder)) is not None:
            self._stop_waiting(holder, address)

    def leave(self, holder: H) -> None:
        """Free its place, where it has one."""
        if (address := self._addresses.pop(holder, None)) is not None:
            self._stop_waiting(holder, address)
            self._held[address] -= 1
            if not self._held[address]:
                del self._held[address]

    def _stop_waiting(self, holder: H, address: str) -> None:
        waiting = self._waiting.get(address, {})
        waiting.pop(holder, None)
        if not waiting:
            self._waiting.pop(address, None)


def client_of(host: str) -> str:
    """Return what counts as one address: a network of 64 bits of IPv6, an address of IPv4.

    Whoever has one address of such a network has all of them.
    """
    if ":" not in host:
        return host
    bare, _, _ = host.partition("%")
    return socket.inet_pton(socket.AF_INET6, bare)[:_IPV6_NETWORK_BYTES].hex()
