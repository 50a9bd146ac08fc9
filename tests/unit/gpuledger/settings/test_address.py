"""A listen address is a host and a port; anything else is refused."""

import pytest

from gpuledger.settings.groups import parse_listen
from tests.errors import has_words


@pytest.mark.parametrize(
    ("listen", "expected"),
    [
        ("127.0.0.1:9820", ("127.0.0.1", 9820)),
        ("localhost:0", ("localhost", 0)),
        (":9820", ("0.0.0.0", 9820)),  # noqa: S104 - compared, not listened on
        ("[::1]:9820", ("::1", 9820)),
    ],
)
def test_host_and_port_are_parsed(listen: str, expected: tuple[str, int]) -> None:
    assert parse_listen(listen) == expected


@pytest.mark.parametrize(
    "listen", ["", "9820", "host", "host:", "host:x", "h:70000", "::1:9820", "http://h:1", "h:-1"]
)
def test_any_other_listen_address_is_refused_with_the_value(listen: str) -> None:
    with pytest.raises(ValueError, check=has_words("host:port")) as raised:
        parse_listen(listen)

    assert repr(listen) in str(raised.value)
