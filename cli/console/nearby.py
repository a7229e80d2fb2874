"""What lies beside a URL where nothing is: the checkpoint that the user may have meant."""

from __future__ import annotations

from ckpt.errors import CkptError
from ckpt.io_backends.registry import join_url, open_backend
from ckpt.text import close_names

_LISTED = 10_000


def near_url(url: str) -> str | None:
    """The URL of a directory beside ``url`` with the same step number (``step-100`` for ``step-00000100``) or nearly the same name."""
    from ckpt.formats.native.paths import step_number

    parent, _, name = url.rstrip("/").rpartition("/")
    if not name or parent.endswith(":/"):
        return None
    try:
        beside = [entry.rstrip("/") for entry in open_backend(parent or ("/" if url.startswith("/") else ".")).list_dir("")[:_LISTED]]
    except CkptError:
        return None  # the storage fails, or the directory above does not exist either: the error itself says enough
    if name in beside:
        return None
    number = step_number(name)
    same = [entry for entry in beside if number is not None and step_number(entry) == number]
    # a step with another number is another checkpoint, never a typing error of this one
    close = same or close_names(name, (entry for entry in beside if number is None or step_number(entry) is None), 1)
    return join_url(parent, close[0]) if close and parent else close[0] if close else None
