"""One error for a library that is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed(library: str, extra: str) -> Iterator[None]:
    """Around the import of a library that only one integration needs.

    Raises:
        ImportError: it is not installed; the message names the extra that brings it.
    """
    try:
        yield
    except ModuleNotFoundError as err:
        if (err.name or "").partition(".")[0] != library:
            raise
        raise ImportError(f"this module needs {library}: pip install 'ckpt-toolkit[{extra}]'", name=library) from err
