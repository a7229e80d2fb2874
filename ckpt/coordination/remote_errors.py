"""Errors on their way between ranks: what a rank reports of its own, and what another one raises for it."""

from __future__ import annotations

from typing import Any

from ckpt import errors
from ckpt.errors import CkptError, CorruptError, GroupError, RankFailedError, error_from_json
from ckpt.plan.tables import ranks_text


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
