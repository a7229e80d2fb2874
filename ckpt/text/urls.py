"""Where something is stored: a URL or path as text, or a local path as an object."""

from __future__ import annotations

import os


def url_text(url: str | os.PathLike[str]) -> str:
    """The text of a URL or of a local path.

    An object that has ``storage_options``, as universal_pathlib's do, stays as it is: its text alone would lose them, so
    ``io_backends.registry`` refuses it and says what to do. A ``pathlib.Path`` made of a URL has lost a slash, ``s3:/bucket``, which is
    refused there too.
    """
    if isinstance(url, os.PathLike) and not hasattr(url, "storage_options"):
        return os.fspath(url)
    return url  # type: ignore[return-value]  # refused with a message when it is opened


def address_text(host: str, port: int) -> str:
    """``host:port``, as URLs have it: with brackets around an address of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
