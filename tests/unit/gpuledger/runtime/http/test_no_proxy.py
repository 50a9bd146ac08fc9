"""Which hosts are reached without the proxy, by the rules of Go programs."""

from __future__ import annotations

import pytest

from gpuledger.runtime.http.no_proxy import NoProxyEntry, is_reached_directly

YES, NO = True, False


@pytest.mark.parametrize(
    ("entry", "url", "is_direct"),
    [
        ("example.com", "https://example.com/x", YES),
        ("example.com", "https://EXAMPLE.com./x", YES),
        ("Example.COM", "https://a.b.example.com", YES),
        ("example.com", "https://badexample.com", NO),
        (".example.com", "https://a.example.com", YES),
        (".example.com", "https://example.com", NO),
        ("*.example.com", "https://a.example.com", YES),
        ("*.example.com", "https://example.com", NO),
        (".svc", "http://prometheus.monitoring.svc:9090", YES),
        ("prometheus", "http://prometheus:9090", YES),
        ("prometheus:9090", "http://prometheus:9090", YES),
        ("prometheus:9090", "http://prometheus:9091", NO),
        ("prometheus:443", "https://prometheus", YES),
        ("prometheus:80", "https://prometheus", NO),
        ("10.0.0.0/8", "http://10.1.2.3:9090", YES),
        ("10.1.2.9/8", "http://10.1.2.3:9090", YES),
        ("10.0.0.0/8", "http://11.1.2.3:9090", NO),
        ("10.0.0.0/8", "http://ten.example.com", NO),
        ("10.1.2.3", "http://10.1.2.3", YES),
        ("10.1.2.3:9090", "http://10.1.2.3:9090", YES),
        ("10.1.2.3:9090", "http://10.1.2.3", NO),
        ("fd00::/8", "http://[fd00::1]:9090", YES),
        ("fd00::1", "http://[fd00::1]:9090", YES),
        ("[fd00::1]:9090", "http://[fd00::1]:9090", YES),
        ("[fd00::1]:9091", "http://[fd00::1]:9090", NO),
        ("fd00::/8", "http://10.1.2.3", NO),
        ("*", "https://anything", YES),
        ("other", "http://127.0.0.1:9090", YES),
        ("other", "http://127.8.8.8:9090", YES),
        ("other", "http://[::1]:9090", YES),
        ("other", "http://localhost:9090", YES),
        ("other", "http://localhost.example.com", NO),
    ],
)
def test_an_entry_has_its_meaning_in_no_proxy(entry: str, url: str, *, is_direct: bool) -> None:
    entries = [NoProxyEntry.parse("elsewhere.test"), NoProxyEntry.parse(f" {entry} ")]
    assert is_reached_directly(url, entries) == is_direct


@pytest.mark.parametrize(
    "text",
    [
        "",
        "http://a",
        "a/b",
        "a b",
        "10.0.0.0/33",
        "10.0.0",
        "a:0",
        "a:70000",
        "a:x",
        "[a]:1",
        "::g",
    ],
)
def test_an_invalid_entry_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected for example"):
        NoProxyEntry.parse(text)
