"""Why pieces come whole from a source that could have sent what changed in them. No torch."""

from __future__ import annotations

from collections.abc import Mapping

FIRST = "first version"
"""The receiver has none yet."""
TORN = "state was torn"
"""A take in place broke off, so what the receiver has is no version."""
DTYPES = "other dtypes"
"""The receiver's state has other dtypes than the source: its memory does not tell what the source has sent."""
NOT_KEPT = "base not kept"
"""The source keeps the version no more that the receiver has."""
NOT_THE_BASE = "state was changed"
"""Somebody has changed what the receiver took."""
NO_SHORTER = "changes no shorter"
OTHER_BASE = "base has other tensors"
"""Or the memory of the base is damaged on the side of the holder."""
SLOTS = "shared memory"
"""Holder and receiver are on one machine, where comparing costs more than copying."""

WHOLE = 0
"""In place of a parcel: the bytes of a piece follow, or lie in a slot. So for these, which say why they are not changes:"""
WHOLE_NOT_KEPT, WHOLE_NO_SHORTER, WHOLE_OTHER_BASE = 1, 2, 3
REASONS: Mapping[int, str] = {WHOLE_NOT_KEPT: NOT_KEPT, WHOLE_NO_SHORTER: NO_SHORTER, WHOLE_OTHER_BASE: OTHER_BASE}
