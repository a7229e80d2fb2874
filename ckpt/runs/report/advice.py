"""Advice on one save, and on the ranks that hold up saves of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from ckpt import units
from ckpt.telemetry.spans import NOTICEABLE, SpanTable

from .summary import Loss, SaveSummary, brief, floor_between

# Sentences: what is worth changing, and which figures say so. Pure. Each rule gives nothing where its figures are unremarkable.

_GAP = 0.05
_LARGE_PART = 0.3
_LONG_PYTHON = 1.0
_UNEVEN = 1.5
_SMALL_WRITE, _MANY_WRITES = 1 << 20, 10_000
_FEW_STEPS = 6
_WORSE = 1.3
_TOGETHER = 0.75
_REPEATED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """What to do, and why: both whole sentences."""

    what: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What rules look at. ``earlier`` are the saves of the run up to this one; ``groups`` are named sets of ranks: hosts, coordinates."""

    save: SaveSummary
    tables: Mapping[int, SpanTable]
    earlier: Sequence[SaveSummary] = ()
    groups: Mapping[str, Sequence[int]]


def advise(facts: Facts) -> tuple[Recommendation, ...]:
    """The most useful first."""
    return tuple(advice for rule in _RULES for advice in rule(facts))


def _stragglers(facts: Facts) -> Iterator[Recommendation]:
    save = facts.save
    if not save.stragglers:
        return
    slow = set(save.stragglers)
    together = [name for name, ranks in facts.groups.items() if len(ranks) > 1 and len(slow & set(ranks)) >= _TOGETHER * len(ranks)]
    first = save.stragglers[0]
    lost = save.work[first] - save.median
    ranks = units.plural(len(facts.tables), "rank")
    why = f"All {ranks} wait for the last one, rank {first}: about {brief(lost)} s of this save."
    if together:
        shared = [rank for rank in save.stragglers if any(rank in facts.groups[name] for name in together)]
        alone = [rank for rank in save.stragglers if rank not in shared]
        if alone:
            works = f"It is slow while its neighbours are not: {brief(save.work[alone[0]])} s of work."
            yield Recommendation(what=f"Look at rank {alone[0]}.", why=f"{why} {works}" if alone[0] == first else works)
        slowest = f"The slowest of them, rank {shared[0]}, works {brief(save.work[shared[0]])} s; the median is {brief(save.median)} s."
        yield Recommendation(
            what=f"Look at {', '.join(together[:4])}: nearly all of these ranks are slow, so look for a cause they share.",
            why=why if shared[0] == first else slowest,
        )
    elif len(slow) > 1:
        yield Recommendation(
            what=f"Look at rank {first} first; {units.plural(len(slow), 'rank')} take more than 1.5 × the median.", why=why
        )
    elif "has more to" in save.verdict:
        yield Recommendation(
            what=f"Give rank {first} less to write: cut its large tensors in the layout, or let more replicas share them.", why=why
        )
    else:
        yield Recommendation(what=f"Look at the machine of rank {first}: its storage, its network, and what else runs there.", why=why)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStraggler:
    """A rank that held up ``saves`` of a run more than any other rank, for ``seconds`` in all, most of it in ``phase``, and longest in the
    save number ``worst``."""

    rank: int
    phase: str
    saves: int
    seconds: float
    worst: int


def run_stragglers(saves: Sequence[SaveSummary]) -> tuple[RunStraggler, ...]:
    """The ranks that were the slowest straggler of a save, those of most saves first."""
    by_rank: dict[int, dict[int, Loss]] = {}
    for number, save in enumerate(saves):
        if save.lost is not None:
            by_rank.setdefault(save.lost.rank, {})[number] = save.lost
    ranks = []
    for rank, losses in by_rank.items():
        phases: dict[str, float] = {}
        for lost in losses.values():
            phases[lost.phase] = phases.get(lost.phase, 0.0) + lost.seconds
        phase = max(phases, key=lambda name: (phases[name], name))
        worst = max(losses, key=lambda number: (losses[number].seconds, number))
        ranks.append(RunStraggler(rank=rank, phase=phase, saves=len(losses), seconds=sum(phases.values()), worst=worst))
    return tuple(sorted(ranks, key=lambda one: (-one.saves, -one.seconds, one.rank)))


def _again(facts: Facts) -> Iterator[Recommendation]:
    for one in run_stragglers(facts.earlier)[:1]:
        if one.saves >= _REPEATED and one.rank not in facts.save.stragglers:
            often = f"It was the slowest in {one.saves:,} of {len(facts.earlier):,} saves"
            yield Recommendation(
                what=f"Look at rank {one.rank}: it is slow again and again, though not in the newest save.",
                why=f"{often}, mostly in {one.phase}: {brief(one.seconds)} s in all.",
            )


def _waiting_caller(facts: Facts) -> Iterator[Recommendation]:
    save = facts.save
    if save.blocked is None or save.background or save.blocked < 1:
        return
    yield Recommendation(
        what="Save in the background: ckpt.save_async, or Checkpointer with its default.",
        why=f"Training stood still for {brief(save.blocked)} s. In the background it waits for the copy of the state only.",
    )


def _sync(facts: Facts) -> Iterator[Recommendation]:
    sync, save = facts.save.phase("sync"), facts.save
    if sync is None or sync.median < _LARGE_PART * save.seconds or sync.median < NOTICEABLE:
        return
    yield Recommendation(
        what="Ask for storage that makes bytes durable faster, or use a local tier and publish in the background.",
        why=f"The median rank spends {brief(sync.median)} s of {brief(save.seconds)} s in sync, after all bytes were written.",
    )


def _python(facts: Facts) -> Iterator[Recommendation]:
    for name in ("collect", "plan"):
        phase = facts.save.phase(name)
        if phase is not None and phase.median >= max(_LONG_PYTHON, 0.1 * facts.save.seconds):
            yield Recommendation(
                what=f"Save fewer, larger tensors, or keep the Checkpointer between saves: {name} takes long.",
                why=f"The median rank spends {brief(phase.median)} s of {brief(facts.save.seconds)} s in {name}.",
            )


def _leader(facts: Facts) -> Iterator[Recommendation]:
    commit = facts.save.phase("commit")
    if commit is not None and commit.seconds >= max(_LARGE_PART * facts.save.seconds, 1.0):
        yield Recommendation(
            what="Look at the leader's storage: small files and renames are slow there.",
            why=f"Commit takes {brief(commit.seconds)} s of {brief(facts.save.seconds)} s; it writes a few small files.",
        )


def _uneven(facts: Facts) -> Iterator[Recommendation]:
    written = [one.nbytes for table in facts.tables.values() if (one := table.sums.get("write")) is not None]
    if len(written) < 2 or not any(written) or facts.save.stragglers:
        return
    if max(written) > _UNEVEN * mean(written) and max(written) > _SMALL_WRITE:
        yield Recommendation(
            what="Spread the bytes more evenly: cut large tensors in the layout, or let replicas share them.",
            why=f"The rank with most writes {units.size(max(written))}, the mean is {units.size(mean(written))}.",
        )


def _small_writes(facts: Facts) -> Iterator[Recommendation]:
    write = facts.save.phase("write")
    if write is not None and write.spans >= _MANY_WRITES and write.bytes < _SMALL_WRITE * write.spans / 4:
        yield Recommendation(
            what="Store fewer, larger tensors: most writes are small.",
            why=f"{write.spans:,} writes carry {units.size(write.bytes / write.spans)} on average.",
        )


def _worse(facts: Facts) -> Iterator[Recommendation]:
    seconds = [save.seconds for save in facts.earlier]
    if len(seconds) < _FEW_STEPS:
        return
    third = len(seconds) // 3
    before, now = median(seconds[:third]), median(seconds[-third:])
    if now > _WORSE * before and now - before >= floor_between(before):
        yield Recommendation(
            what="Find out what has changed: saves have become slower.",
            why=f"The last {third} saves took {brief(now)} s (median), the first {third} took {brief(before)} s.",
        )


def _gaps(facts: Facts) -> Iterator[Recommendation]:
    gap = facts.save.unaccounted
    if gap is not None and gap.share >= _GAP and gap.seconds >= NOTICEABLE:
        yield Recommendation(
            what="Do not look for all of the time in the phases.",
            why=f"No phase covers {brief(gap.seconds)} s of rank {gap.rank} ({100 * gap.share:.0f} % of the save).",
        )


_RULES: tuple[Callable[[Facts], Iterator[Recommendation]], ...] = (
    _stragglers,
    _again,
    _worse,
    _waiting_caller,
    _sync,
    _python,
    _leader,
    _uneven,
    _small_writes,
    _gaps,
)
