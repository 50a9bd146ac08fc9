"""How receivers are shown to people: without user, password or query, where tokens may stand."""

from urllib.parse import urlsplit


def shown_url(url: str) -> str:
    """Return the URL with nothing in it that may be a secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
