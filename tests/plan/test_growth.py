"""Nothing grows faster than the ranks: one table of all operations, each played at several sizes with the code that runs.

``OPERATIONS`` is the table. CPU seconds of a rank and of the leader may grow with an exponent of ``GROWTH``; messages and requests are
counted exactly, and bytes have a limit for each rank. A public name or command that is in no row, and not in ``CONSTANT``, fails
``test_every_public_operation_is_in_the_table``.
"""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

import ckpt
import ckpt.live
import ckpt.plan.layout.tensor_layout as layout_module
from benchmarks import scale_jobs, scale_load, scale_save
from benchmarks.played import Played
from benchmarks.scale_calls import Calls, missing_copies_seconds
from ckpt.cli.main import COMMANDS
from ckpt.plan import flat, ownership
from ckpt.plan import ownership as flat_fragments
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.placement_base import Split
from ckpt.plan.layout.placements import Flat, Interleaved, Shard
from ckpt.plan.layout.tensor_layout import TensorLayout
from tests.api.checked import empty_directory
from tests.plan import live_plan
from tests.plan.commands_at_scale import Run, Tensors, Values, seconds

SIZES = (256, 1024, 4096)
FEW = (256, 1024)
"""Sizes of what takes seconds at 4,096. Without ``--slow``, the first two count; with it, one more is played."""
GROWTH = 1.1
"""Most exponent with which CPU seconds may grow from one size to the next."""
FLOOR = 0.02
"""CPU seconds that are added to each size: those of a cost that does not grow, and what a busy machine may add."""
ROUNDS = 12
"""The least of so many measurements counts where a cost has grown too fast: other work makes a cost larger, never smaller."""
Cost = Mapping[str, float]
"""CPU seconds by who needs them."""


class Models:
    """What the operations are played on, made once: the calls of a job, runs and checkpoints, by size."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._made: dict[tuple[Any, ...], Any] = {}

    def get(self, kind: Callable[..., Any], size: int, **options: Any) -> Any:
        key = (kind, size, *options.items())
        if key not in self._made:
            self._made[key] = kind(size, self.folder, **options)
        return self._made[key]

    def close(self) -> None:
        for made in self._made.values():
            if isinstance(made, Calls):
                made.close()
        self._made.clear()

    def calls(self, ranks: int, *, experts: bool = False) -> Calls:
        """Of a job that has saved."""
        made: Calls = self.get(Calls, ranks, experts=experts)
        if not hasattr(made, "saved"):
            made.save()
        return made


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    of_others = set(threading.enumerate())
    with empty_directory() as folder:
        models = Models(folder)
        yield models
        models.close()
    gc.unfreeze()  # what the tests below froze: the connections of ranks end with their groups
    gc.collect()
    gc.freeze()
    for thread in threading.enumerate():
        if thread.name.startswith("ckpt") and thread not in of_others:
            thread.join(20)
            assert not thread.is_alive(), thread.name


def forget() -> None:
    """The next plan pays for everything again."""
    caches: tuple[Any, ...] = (
        *(ownership._assignment, ownership._assignment_of_rows, flat_fragments._moves, flat_fragments._place),
        *(layout_module.flat_blocks, flat.whole_grid, flat.row_grid),
        *(layout_module._axes, layout_module._tiling, layout_module._pieces),
    )
    for cache in caches:
        cache.cache_clear()
    gc.collect()


# --------------------------------------------------------------------------------------------------------------- the table


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One row. ``covers``: the public names and commands that it is. ``play`` is run at each of ``sizes``, which are numbers of ``over``.

    ``messages`` of the leader and of another rank, ``requests`` of the two, exactly; those of a run depend on how old its records are.
    ``put`` and ``got``: most bytes of another rank into the store and out of it; ``leader``: most bytes for each rank that the leader gets.
    ``why``: something of this row grows with the square of the ranks, over all of them, or has an exponent in ``known``.
    """

    name: str
    covers: tuple[str, ...]
    play: Callable[[Models, int], Played | Cost]
    over: str = "ranks"
    sizes: tuple[int, ...] = SIZES
    messages: Callable[[int], tuple[int, int]] | tuple[int, int] | None = None
    requests: int | range | None = None
    put: int = 0
    got: Callable[[int], float] | int = 0
    leader: int = 0
    known: Mapping[str, float] = field(default_factory=dict)
    why: str = ""


def plan(kind: Callable[..., scale_jobs.Job], layers: int = 4) -> Callable[[Models, int], Cost]:
    """One rank's plan of a save, and of the next one."""

    def play(models: Models, ranks: int) -> Cost:
        forget()
        found = scale_save.plan(kind(ranks, layers))
        return {"rank, first": found["first"], "rank, next": found["second"]}

    return play


def plan_of_tensors(models: Models, layers: int) -> Cost:
    """Of a mixture of experts in all layers but the first three: a rank that has all, and the leader of groups that have some."""
    forget()
    led = scale_save.lead(scale_jobs.experts(512, layers + 3, ep=8), spans=1)
    forget()
    return {
        "rank": scale_save.plan(scale_jobs.every_expert(512, layers + 3))["first"],
        "leader": led["all_0"],
        "leader, next": led["all_1"],
    }


def tiling(*splits: Split) -> Callable[[Models, int], Cost]:
    """How a layout cuts a tensor, where ranks are listed one by one."""

    def play(models: Models, ranks: int) -> Cost:
        forget()
        layout = TensorLayout(Mesh(("dp", "tp"), (ranks // 8, 8), tuple(range(0, 2 * ranks, 2))), splits)
        began = time.process_time()
        layout.tiling((53_248, 16_384))
        assert len(layout.pieces((53_248, 16_384), ranks)) > 0
        return {"rank": time.process_time() - began}

    return play


def lead(kind: Callable[..., scale_jobs.Job], layers: int = 4, **options: int) -> Callable[[Models, int], Cost]:
    """The leader's part of the first two saves: checks, index, commit and spans."""

    def play(models: Models, ranks: int) -> Cost:
        forget()
        found = scale_save.lead(kind(ranks, layers), spans=8, **options)
        assert found["index"] < 400_000 + 100 * ranks
        return {"leader, first": found["all_0"], "leader, next": found["all_1"]}

    return play


def share(wanted: Callable[[int], Any]) -> Callable[[Models, int], Cost]:
    """What one rank finds of the chunks that it and others want, of a checkpoint in flat ranges over all ranks."""
    return lambda models, ranks: {"rank": scale_load.share_seconds(1, scale_load.flat(ranks), wanted(ranks))}


def command(*words: str, exit_code: int = 0) -> Callable[[Models, int], Cost]:
    """A command on a checkpoint of so many tensors."""
    return lambda models, tensors: {"command": models.get(Tensors, tensors).run(*words, exit_code=exit_code)}


def in_blocks(leader: int, other: int, each: int = 2) -> Callable[[int], tuple[int, int]]:
    """Messages of which the leader has some more for each 256 ranks, to see that what they have of their own is there, and to get it."""
    return lambda ranks: (leader + each * (ranks // 256), other)


def of_a_save(*words: str) -> Callable[[Models, int], Cost]:
    """A command on a checkpoint of so many ranks."""
    return lambda models, ranks: {"command": seconds(words[0], models.calls(ranks).saved, *words[1:])}


def of_a_run(ask: Callable[[Run], float]) -> Callable[[Models, int], Cost]:
    return lambda models, steps: {"one process": ask(models.get(Run, steps))}


def first(call: Callable[[Calls], Played], **options: bool) -> Callable[[Models, int], Played]:
    """A call of a job that has made none."""

    def play(models: Models, ranks: int) -> Played:
        with closing(Calls(ranks, f"{models.folder}/first", **options)) as calls:
            return call(calls)

    return play


def again(call: Callable[[Calls], Played], **options: bool) -> Callable[[Models, int], Played]:
    """A call for at least the second time."""

    def play(models: Models, ranks: int) -> Played:
        calls = models.calls(ranks, **options)
        if call not in calls.made:
            calls.made.add(call)
            call(calls)
        return call(calls)

    return play


def take(models: Models, ranks: int) -> Played:
    """By as many ranks as the source has."""
    calls = models.calls(ranks)
    with calls.source():
        calls.publish()
        take = calls.sink()
        take()
        return take()


def publish(models: Models, ranks: int) -> Played:
    calls = models.calls(ranks)
    with calls.source():
        calls.publish()
        return calls.publish()


def step(models: Models, ranks: int) -> Played:
    calls = models.calls(ranks)
    if not calls.checkpointers:
        calls.checkpointer(layout=calls.layout)
        for _ in range(3):
            calls.step()
    return calls.step()


def restore(calls: Calls) -> Played:
    if not calls.checkpointers:
        calls.checkpointer(layout=calls.layout)
        calls.step()
    return calls.restore()


def reshard_plan(models: Models, ranks: int) -> Cost:
    """From pipeline stages with experts to half as many ranks: one receiver reads the tables, joins them and plans."""
    return {"rank": sum(live_plan.planned(live_plan.Job(source=ranks, target=ranks // 2, layers=16, experts=64)).values())}


LOADED = ("load", "LoadReport")
SAVED = ("save", "SaveReport")
OPERATIONS = [
    # ---- collective calls, whole: of two real ranks among so many
    Operation(name="first save", covers=SAVED, play=first(Calls.save), messages=(11, 8), requests=38, put=1300, got=120, leader=1500),
    Operation(
        name="first save, tensors of each rank's own",
        covers=SAVED,
        sizes=(512, 2048),
        play=first(Calls.save, experts=True),
        messages=in_blocks(15, 12),
        requests=38,
        put=2000,
        got=500,
        leader=1700,
    ),
    Operation(
        name="next save",
        covers=SAVED,
        play=again(Calls.save),
        messages=(11, 8),
        requests=38,
        put=1300,
        got=120,
        leader=1500,
    ),
    Operation(
        name="async save",
        covers=("save_async", "SaveHandle", "fence"),
        play=again(Calls.save_async),
        messages=(11, 8),
        requests=38,
        put=1500,
        got=120,
        leader=1500,
    ),
    Operation(
        name="save of a run, with retention",
        covers=("Checkpointer", "Checkpointer.step", "Checkpointer.save", "Checkpointer.wait"),
        play=step,
        messages=(11, 8),
        requests=range(54, 62),
        put=1500,
        got=120,
        leader=1500,
    ),
    Operation(
        name="save that refers to another",
        covers=SAVED,
        play=again(Calls.references),
        messages=(11, 8),
        requests=35,  # one to see whether data/, in which nothing is, is a link
        put=1300,
        got=120,
        leader=1500,
    ),
    Operation(
        name="load",
        covers=LOADED,
        play=again(Calls.load),
        messages=(16, 12),
        requests=26,
        put=800,
        got=120,
        leader=800,
    ),
    Operation(
        name="load, tensors of each rank's own",
        covers=LOADED,
        sizes=(512, 2048),
        play=again(Calls.load, experts=True),
        messages=in_blocks(17, 14),
        requests=26,
        put=1100,
        got=280,
        leader=1500,
    ),
    Operation(
        name="restore",
        covers=("Checkpointer.restore", "RestoredFrom"),
        play=again(restore),
        messages=(26, 20),
        requests=range(26, 36),
        put=1500,
        got=260,
        leader=1400,
    ),
    Operation(
        name="reshard, again",
        covers=("live.reshard", "live.ReshardReport", "live.Traffic"),
        play=again(Calls.reshard),
        messages=(27, 20),
        requests=0,
        put=1300,
        got=350,
        leader=1500,
    ),
    Operation(
        name="reshard, first, tensors of each rank's own",
        covers=("live.reshard",),
        sizes=(512, 2048),
        play=first(Calls.reshard, experts=True),
        messages=in_blocks(41, 33, 4),
        requests=0,
        put=2600,
        got=1000,
        leader=2300,
    ),
    Operation(
        name="publish",
        covers=("live.Source", "Source.publish", "Source.close", "live.Publication", "live.PublishReport", "live.Version"),
        play=publish,
        messages=(5, 4),
        requests=0,
        put=450,
        got=200,
        leader=450,
    ),
    Operation(
        name="take",
        covers=("live.Sink", "Sink.take", "Sink.tensors", "Sink.run_on_all", "Sink.close", "Sink.version", "live.TakeReport"),
        play=take,
        messages=(23, 16),
        requests=0,
        put=900,
        got=350,
        leader=900,
    ),
    Operation(
        name="machines of a tier meet",
        covers=("SharedLocal", "NodeLocal", "Memory"),
        play=lambda models, ranks: models.calls(ranks).meet(),
        messages=(21, 16),
        requests=5,
        put=600,
        got=lambda ranks: 500 + 45 * ranks,
        leader=650,
        why="each rank gets the addresses of all machines",
    ),
    # ---- plans: one rank's work, and the leader's
    *(
        Operation(name=f"plan of a save, {name}", covers=SAVED, play=plan(kind, layers))
        for name, kind, layers in (
            ("FSDP1", scale_jobs.fsdp1, 4),
            ("FSDP2", scale_jobs.fsdp, 4),
            ("HSDP", scale_jobs.hsdp, 4),
            ("flat", scale_jobs.zero, 4),
            ("3-D", scale_jobs.three_d, 16),
            ("EP64", scale_jobs.experts, 4),
        )
    ),
    Operation(name="plan of a save, experts", covers=SAVED, over="layers with 256 experts", sizes=(2, 8), play=plan_of_tensors),
    *(
        Operation(name=f"tiling, {splits}", covers=SAVED, play=tiling(*splits))
        for splits in ((Flat("dp"),), (Shard(0, "tp"), Flat("dp")), (Interleaved(0, "tp", 2), Shard(0, "dp")))
    ),
    Operation(name="leader of a save, 3-D", covers=SAVED, play=lead(scale_jobs.three_d, 16)),
    Operation(name="leader of a save, flat", covers=SAVED, play=lead(scale_jobs.zero)),
    Operation(name="leader of a save, EP64", covers=SAVED, play=lead(scale_jobs.experts)),
    Operation(name="leader of a save, values of each rank's own", covers=SAVED, play=lead(scale_jobs.fsdp, own=2)),
    *(
        Operation(name=f"load, onto {name}", covers=LOADED, play=share(wanted))
        for name, wanted in (
            ("the same flat ranges", scale_load.flat),
            ("half as many ranks", lambda ranks: scale_load.flat(ranks // 2)),
            ("rows over all ranks", scale_load.rows),
            ("HSDP", scale_load.hsdp),
            ("replicas", scale_load.replicated),
            ("eight parts with replicas", scale_load.tensor_parallel),
            ("eight parts", lambda ranks: scale_load.tensor_parallel(8)),
            ("rows in eight parts", scale_load.two_d),
        )
    ),
    Operation(name="plan of a reshard", covers=("live.reshard",), play=reshard_plan),
    Operation(
        name="copies that lack", covers=("Checkpointer.uncopied",), play=lambda models, ranks: {"machine": missing_copies_seconds(ranks)}
    ),
    # ---- a run
    *(
        Operation(
            name=name,
            covers=covers,
            over="steps",
            sizes=sizes,
            play=of_a_run(ask),
        )
        for name, covers, ask, sizes in (
            ("retention", ("Checkpointer",), Run.retention, SIZES),
            ("gc", ("ckpt gc",), Run.gc, FEW),
            ("ls", ("ckpt ls", "latest", "list_steps", "Checkpointer.steps", "Checkpointer.latest", "Checkpointer.best"), Run.ls, FEW),
            ("restore: what is there", ("Checkpointer.restore",), Run.restore, SIZES),
        )
    ),
    # ---- one checkpoint
    *(
        Operation(name=f"{words[0]} of a save", covers=(f"ckpt {words[0]}",), play=of_a_save(*words))
        for words in (("report", "-o", "/dev/null"), ("stats",), ("watch", "--once"), ("inspect",))
    ),
    Operation(
        name="save, one rank", covers=SAVED, over="tensors", play=lambda models, tensors: {"rank": models.get(Tensors, tensors).save()}
    ),
    Operation(
        name="load, one rank", covers=LOADED, over="tensors", play=lambda models, tensors: {"rank": models.get(Tensors, tensors).load()}
    ),
    *(
        Operation(name=words[0], covers=covers, over="tensors", sizes=FEW, play=command(*words, exit_code=code))
        for words, covers, code in (
            (("verify", "URL"), ("ckpt verify", "verify", "VerifyReport"), 0),
            (("diff", "URL", "OTHER"), ("ckpt diff",), 3),
            (("inspect", "URL"), ("ckpt inspect", "open", "View"), 0),
            (("plan", "URL", "--layout", "8"), ("ckpt plan",), 0),
            (("convert", "URL", "TARGET", "--to", "dcp"), ("ckpt convert", "convert", "ConvertReport"), 0),
            (("cp", "URL", "TARGET"), ("ckpt cp", "copy", "CopyReport"), 0),
            (("import", "URL", "TARGET"), ("ckpt import",), 0),
            (("merge", "TARGET", "URL", "OTHER"), ("ckpt merge", "merge", "MergeReport"), 0),
            (("rebuild", "URL", "--dry-run"), ("ckpt rebuild",), 0),
        )
    ),
    Operation(
        name="diff of values",
        covers=("ckpt diff",),
        over="values",
        sizes=(4096, 16_384),
        play=lambda models, values: {"command": models.get(Values, values).diff()},
    ),
]
CONSTANT = {
    "no work: values, types, reports and errors": (
        *("__version__", "PerRank", "Layout", "Mesh", "Shard", "Replicate", "Flat", "Interleaved", "Padded", "Uneven", "GlobalShape"),
        *("Stage", "OnMesh", "Numbered", "pipeline", "experts", "MegatronParallel", "ExportReport", "BeginFrom", "CkptError"),
        *(
            "Job",
            "ReadOptions",
            "Member",
            "MemberChanges",
            "errors",
            "policies",
            "formats",
            "io_backends",
            "converters",
            "Checkpointer.url",
            "Checkpointer.preempted",
        ),
        *("Checkpointer.handle", "Checkpointer.restored_from"),
        *("live.SourceStatus", "live.VersionStatus", "live.SinkStatus"),
    ),
    "modules whose operations are in the table, or are those of one rank on its own state": (
        *("live", "integrations", "monitors", "training"),
    ),
    "names of another convention, computed for each tensor as in load": ("translated", "Translation"),
    "a setting of this process": ("configure_storage",),
    "ends what goes on: the waits are those of the rows": ("Checkpointer.close", "Checkpointer.unpublished"),
    "asks one leader for as many rows as it keeps versions": ("Source.report", "ckpt live"),
    "one record of one step": ("ckpt tag", "ckpt rm"),
    "one object, which the leading rank of each job asks for": ("Checkpointer.requested",),
    "one machine's daemon": ("ckpt memory",),
    "runs a job on the ranks of one machine": ("testing", "ckpt prove"),
    "a report of at most --last saves": ("ckpt advise",),
    "text that does not depend on a checkpoint": ("ckpt completion",),
    "tensors by the pipeline of convert": ("export", "ckpt lora"),
}
"""Public names and commands that are in no row, by the reason."""


# ----------------------------------------------------------------------------------------------------------------- the tests


def seconds_of(cost: Played | Cost) -> Cost:
    return {"two ranks": cost.cpu} if isinstance(cost, Played) else cost


def exponents(few: int, many: int, least: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Between two sizes, by who has it."""
    grown = {who: (least[many][who] + FLOOR) / (before + FLOOR) for who, before in least[few].items()}
    return {who: math.log(ratio) / math.log(many / few) for who, ratio in grown.items()}


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_nothing_grows_faster_than_its_ranks(operation: Operation, models: Models, request: pytest.FixtureRequest) -> None:
    sizes = (*operation.sizes, 4 * operation.sizes[-1]) if request.config.getoption("--slow") else operation.sizes[:2]
    least: dict[int, dict[str, float]] = {}
    gc.collect()
    gc.freeze()  # what other rows have left is none of this one's garbage
    late: Sequence[int] = sizes
    for turn in range(ROUNDS):
        for size in late:
            cost = operation.play(models, size)
            for who, spent in seconds_of(cost).items():
                least.setdefault(size, {})[who] = min(spent, least.get(size, {}).get(who, math.inf))
            if isinstance(cost, Played) and turn == 0:
                check_counts(operation, size, cost)
        grown = {many: exponents(few, many, least) for few, many in pairwise(sizes)}
        late = [size for size, found in grown.items() if any(e > operation.known.get(who, GROWTH) for who, e in found.items())]
        if not late:
            break
    print(f"{operation.name}: {least}, exponents {grown}")
    assert not late, (grown, least)


def check_counts(operation: Operation, ranks: int, played: Played) -> None:
    print(f"{ranks:,} {operation.over}: {played.messages} messages, {played.put} put, {played.got} got, {played.requests} requests")
    messages = operation.messages(ranks) if callable(operation.messages) else operation.messages
    assert played.messages == messages
    assert played.requests == operation.requests or (isinstance(operation.requests, range) and played.requests in operation.requests)
    got = operation.got(ranks) if callable(operation.got) else operation.got
    assert played.put[1] <= operation.put and played.got[1] <= got and played.got[0] <= operation.leader * ranks


def test_every_public_operation_is_in_the_table() -> None:
    names = {*ckpt.__all__, *(f"live.{name}" for name in ckpt.live.__all__), *(f"ckpt {command}" for command in COMMANDS)}
    for collective in (ckpt.Checkpointer, ckpt.live.Source, ckpt.live.Sink):
        names |= {f"{collective.__name__}.{name}" for name in vars(collective) if not name.startswith("_")}
    covered = {name for operation in OPERATIONS for name in operation.covers}
    constant = {name for some in CONSTANT.values() for name in some}
    assert not covered & constant
    assert names - covered - constant == set(), "give the operation a row in OPERATIONS, or say in CONSTANT why its cost does not grow"
    assert covered | constant <= names
    assert all(operation.why for operation in OPERATIONS if operation.known or callable(operation.got))
