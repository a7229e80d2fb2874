"""The rows that ranks post in one phase, as the leader reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt.errors import ConsistencyError
from ckpt.text.json_reader import parse_json

from .remote_errors import failure

Row = dict[str, Any]
"""What a rank contributes to one phase: JSON."""


def parse_posted(texts: Mapping[int, bytes]) -> dict[int, Row]:
    """Parse what the ranks posted, by position. Rows of many ranks are equal: each different text is parsed once, and all at once."""
    different = set(texts.values())
    parsed = dict(zip(different, parse_json(b"[" + b",".join(different) + b"]"), strict=True))
    return {position: parsed[text] for position, text in texts.items()}


def check_posted(posted: Mapping[int, Row], kind: str, url: str, phase: str) -> None:
    """Check what was posted, by rank, the leader first."""
    errors = {rank: row["error"] for rank, row in posted.items() if "error" in row}
    if errors:
        raise failure(kind, phase, errors)
    leader = next(iter(posted))
    for rank, row in posted.items():
        if (row["kind"], row["url"]) != (kind, url):
            raise ConsistencyError(
                f"rank {rank} calls {row['kind']}({row['url']!r}) while rank {leader} calls {kind}({url!r})",
                hint="make the same calls in the same order on every rank",
            )
