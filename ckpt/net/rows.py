"""The rows that ranks post in one phase, as the leader reads them, and errors on their way between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt import errors
from ckpt.errors import CkptError, ConsistencyError, CorruptError, GroupError, RankFailedError, error_from_json
from ckpt.plan.tables import ranks_text
from ckpt.text import parse_json

# Errors on their way between ranks: what a rank reports of its own, and what another one raises for it.


def failure(kind: str, phase: str, failed: dict[int, Any]) -> GroupError:
    """One error for what failed on other ranks; ranks with equal texts are named together."""
    by_text: dict[str, list[int]] = {}
    for rank, err in failed.items():
        by_text.setdefault(f"{err['type']}: {err['message']}" + (f" ({err['where']})" if err["where"] else ""), []).append(rank)
    failures = "; ".join(f"{ranks_text(ranks)} raised {text}" for text, ranks in by_text.items())
    hint = next((err["hint"] for err in failed.values() if err["hint"]), None)
    error = RankFailedError(f"{kind} failed in phase {phase!r}: {failures}", hint=hint)
    error.ranks = tuple(sorted(failed))
    error.causes = tuple(name for rank in sorted(failed) for name in _causes(failed[rank]))
    return error


def _causes(report: dict[str, Any]) -> tuple[str, ...]:
    return (report["type"], *report.get("causes", ()))


def failed_on(rank: int, report: dict[str, Any]) -> CkptError:
    """What to raise for an error of another rank that this one waits for. Damage stays what it is, whoever finds it."""
    if report["type"] == CorruptError.__name__:
        return CorruptError(f"{report['message']} (found by rank {rank})", where=report["where"], hint=report["hint"])
    error = RankFailedError(f"rank {rank} failed: {report['message']}", where=report["where"], hint=report["hint"])
    error.ranks = (rank,)
    error.causes = _causes(report)
    return error


def error_of(kind: str, phase: str, verdict: dict[str, Any]) -> CkptError:
    """What the leader decided for all, as the same class on every rank if it is one of ours; or what happened on one rank."""
    data = verdict["error"]
    if verdict["decided"] and data["type"] in errors.__all__:
        return error_from_json(data)
    return failure(kind, phase, {verdict["rank"]: data})


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
