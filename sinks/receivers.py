"""How receivers are shown to people: without user, password or query, where tokens may stand."""

from urllib.parse import urlsplit


def shown_url(url: str) -> str:
    """Return the URL, or the path, with nothing in it that may be a secret."""
    parts = urlsplit(url)
    if not parts.scheme:
        return url
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
