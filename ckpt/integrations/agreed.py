"""What all ranks have to see alike before they go different ways."""

from __future__ import annotations

from ckpt import settings
from ckpt.coordination.group import current_group
from ckpt.training.checkpointer import Checkpointer


def agreed_latest(checkpointer: Checkpointer) -> int | None:
    """The newest committed step as the leading rank sees it; collective. Listings of shared storage may differ for a while."""
    call = current_group().call("latest", checkpointer.root, settings.timeout(None))
    latest = call.map_reduce("latest", dict, lambda rows: checkpointer.latest)
    return None if latest is None else int(latest)
