"""What a format that can be converted to has to say, and which there are; and what a conversion is asked for. No torch.

A target plans before anything is read: which files there will be, how long they are, and where in them every tensor's bytes lie. What
else is in a file (headers, directories) it gives when the digests of the tensors are known.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict

from ckpt import settings
from ckpt.errors import UsageError
from ckpt.needs import attribute, plugin, plugin_names
from ckpt.plan.layout.geometry import Box

from .selection import OutputSet, OutputTensor, SelectOptions, Views

if TYPE_CHECKING:
    from ckpt.catalog import Catalog
    from ckpt.io_backends.protocol import Backend


# How a Megatron job divides a model among its ranks: what a conversion into one of its formats is asked for. Pure.

Argument = None | bool | int | float | str

_SAID_BY = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "virtual_pipeline_model_parallel_size": "virtual",
    "num_virtual_stages_per_pipeline_rank": "virtual",
    "num_layers_per_virtual_pipeline_stage": "virtual",
    "expert_model_parallel_size": "expert",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronParallel:
    """Ranks of tensor, pipeline and expert parallelism, and how many virtual stages each pipeline rank has.

    ``arguments`` of the job, by their names in Megatron-LM's ``args``, override those of the source: ``transformer_impl``,
    ``make_vocab_size_divisible_by``, ``decoder_first_pipeline_num_layers`` and the like.

    Raises:
        UsageError: sizes that cannot be, or arguments that say the same.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    expert: int = 1
    arguments: Mapping[str, Argument] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if min(self.tensor, self.pipeline, self.virtual, self.expert) < 1:
            raise UsageError("a parallelism of less than 1 rank", hint="1 is none")
        if self.virtual > 1 and self.pipeline == 1:
            raise UsageError("virtual stages need a pipeline of several ranks", hint="--pp 2 --vpp 2")
        twice = sorted(self.arguments.keys() & _SAID_BY.keys())
        if twice:
            hint = f"MegatronParallel({_SAID_BY[twice[0]]}=…): --tp, --pp, --vpp, --ep"
            raise UsageError(f"the argument {twice[0]} is a separate option", hint=hint)


# How the tensors of a file are cut into windows: ranges of the file that are read, held in memory and written at once. Pure.
#
# Invariants: the segments of all windows of a file are the items, each byte once and in the order of the file; no window is longer than
# asked for, unless one element is.

# A window is the image of a range of the output file. Items are cut into segments that are contiguous in the file, along the first axis
# that has more than one row, and best where stored chunks end (*seams*): then no chunk is read for two windows.
#
#     items       |---- a [6 rows] ----|-- b --|-------- c [8 rows] --------|
#     seams             ^     ^                      ^           ^
#     segments    |--a--|--a--|--a-----|---b---|--c--|-----c-----|----c-----|
#     windows     |--------- 1 --------|------- 2 ---|---------- 3 ---------|     each at most ``most`` bytes
#
# A segment is at most UNIT long, so that several threads can fill one window.


PAGE = 4096
"""Bytes of a page, for direct I/O: where pieces of a file begin and end."""


class FileItem(NamedTuple):
    """A box of a tensor in a file, row by row from byte ``offset`` on."""

    name: str
    box: Box
    offset: int
    itemsize: int

    @property
    def length(self) -> int:
        return self.box.numel * self.itemsize


class FileSegment(NamedTuple):
    """A contiguous part of item number ``item``: ``box`` in the coordinates of the tensor, ``start`` in bytes of the file."""

    item: int
    box: Box
    start: int
    length: int


def windows(items: Sequence[FileItem], seams: Sequence[Sequence[int]], most: int, enough: int | None = None) -> Iterator[list[FileSegment]]:
    """Windows of at most ``most`` bytes of a file with these items, in order of their offsets. One that has ``enough`` bytes ends with its
    item: no chunk is in two items, so none is read twice for that.

    ``seams`` has for each item the places along its first axis, increasing, where it is best cut, because stored chunks end there.
    """
    # Greedy and in one pass, since segments come in the order of the file: a window is closed as soon as the next
    # segment would make it too long.
    pending: list[FileSegment] = []
    enough = most if enough is None else enough
    for number, (item, places) in enumerate(zip(items, seams, strict=True)):
        at = item.offset
        if pending and at - pending[0].start >= enough:
            yield pending
            pending = []
        for box in slabs(item.box, item.itemsize, places, min(most, settings.CHUNK)):
            segment = FileSegment(number, box, at, box.numel * item.itemsize)
            at += segment.length
            if pending and at - pending[0].start > most:
                yield pending
                pending = []
            pending.append(segment)
    if pending:
        yield pending


def slabs(box: Box, itemsize: int, seams: Sequence[int], most: int) -> Iterator[Box]:
    """A box in parts of at most ``most`` bytes that are contiguous in it, row by row; nothing of an empty box."""
    if not box.numel:
        return
    axis = next((i for i, n in enumerate(box.shape) if n > 1), None)
    if axis is None or box.numel * itemsize <= most:
        yield box
        return
    row = box.numel // box.shape[axis] * itemsize
    cuts = cuts_at(box.offset[axis], box.end[axis], max(1, most // row), () if axis else seams)
    for start, stop in pairwise(cuts):
        yield from slabs(box.narrowed(axis, start, stop), itemsize, (), most)


def cuts_at(start: int, stop: int, count: int, seams: Sequence[int]) -> tuple[int, ...]:
    """Boundaries of parts of at most ``count``, from ``start`` to ``stop``: at the last of the increasing ``seams`` that a part reaches, if
    it reaches one."""
    cuts = [start]
    while cuts[-1] + count < stop:
        # The last seam that the part can reach. Without one in reach it is cut at its full length, in the middle of a
        # stored chunk, which is then read for two windows.
        best = bisect_right(seams, cuts[-1] + count) - 1
        cuts.append(seams[best] if best >= 0 and seams[best] > cuts[-1] else cuts[-1] + count)
    return (*cuts, stop)


Digest = Literal["xxh3", "crc32"]
Ends = Callable[[Sequence[int]], list[tuple[int, bytes]]]
"""From the digests of the items, in their order, to what else is in the file: bytes and where they begin."""

ENTRY_POINTS = "ckpt.targets"
"""Group of entry points that are ``Target`` values of other distributions."""


@dataclass(frozen=True, kw_only=True)
class OutputFile:
    """A file to be written: ``path`` below the root of the destination, ``size`` in bytes, ``items`` in the order of the file."""

    path: str
    size: int
    items: tuple[FileItem, ...]
    ends: Ends
    check: Callable[[Backend, OutputFile], None] | None = None
    """Opens the durable file as others will, by the library of its format; asked for by ``verify``. Raises CorruptError."""


@dataclass(frozen=True, kw_only=True)
class OutputPlan:
    """``digest`` is of the items, for ``OutputFile.ends``. ``finish`` makes the checkpoint exist when all files are there: by one process
    at a time, and again if one died while it did. ``last`` are paths of files that it adds, and nobody else would. ``tensors`` are those
    that the items of the files name; None: the chosen ones."""

    files: tuple[OutputFile, ...]
    digest: Digest | None
    finish: Callable[[Backend], None]
    last: tuple[str, ...] = ()
    tensors: Mapping[str, OutputTensor] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputOptions:
    """What the plan of files depends on besides the tensors. ``id`` is the same in all processes of a conversion; ``url`` is the
    destination; ``shard_size`` in bytes, or None for what the target thinks best; ``name`` of the only file, where the destination is one;
    ``previous`` is the commit record that is replaced, if any; ``parallel`` the ranks that are asked for, if any; ``beside`` are
    small files that go with the tensors, by name: with ``hf`` the model's configuration and what lies beside that; ``require_config``
    says that there has to be one."""

    id: str
    url: str
    shard_size: int | None
    name: str | None
    previous: bytes | None
    parallel: MegatronParallel | None = None
    beside: Mapping[str, bytes] = field(default_factory=dict)
    require_config: bool = False


@dataclass(frozen=True, kw_only=True)
class Target:
    """A format to convert to. ``one_file`` says of a destination whether it is one file rather than a directory."""

    name: str
    choose: Callable[[Catalog, SelectOptions], OutputSet]
    plan: Callable[[OutputSet, OutputOptions], OutputPlan]
    one_file: Callable[[str], bool] = lambda url: False
    replaces: bool = False
    """Whether a checkpoint at the destination can be replaced atomically."""
    parallel: bool = False
    """Whether the files depend on ``OutputOptions.parallel``."""
    computes: bool = False
    """Whether the files have the chosen tensors themselves (``OutputSet.tensors``, or ``without_padding`` of them), so that computed ones
    are kept. A target that makes tensors of its own from their views would write what is stored instead."""
    notes: Callable[[OutputSet], tuple[str, ...]] = lambda chosen: ()
    """What the user should know of a directory that is written, where the caller gave no configuration: ``ConvertReport.notes``."""


OWN = {
    "native": "ckpt.converters.targets.native:TARGET",
    "hf": "ckpt.converters.targets.hf:TARGET",
    "torch": "ckpt.converters.targets.torch_file:TARGET",
    "dcp": "ckpt.converters.targets.dcp:TARGET",
    "torch_dist": "ckpt.converters.targets.torch_dist:TARGET",
    "megatron": "ckpt.converters.targets.megatron_ranks:TARGET",
}


def target(name: str) -> Target:
    """The target of this name.

    Raises:
        UsageError: there is none.
    """
    reference = OWN.get(name)
    if reference is not None:
        builtin: Target = attribute(reference)
        return builtin
    if (given := plugin(ENTRY_POINTS, name, Target)) is not None:
        return given
    others = ", ".join([*(name for name in OWN if name != "native"), *plugin_names(ENTRY_POINTS)])
    raise UsageError(f"cannot convert to {name!r}: no such format", hint=f"native (that of ckpt itself), or one of {others}")


def parent_and_name(url: str) -> tuple[str, str]:
    """The directory of a file, and its name there.

    Raises:
        UsageError: it is no file that the URL names.
    """
    head, slash, name = url.rpartition("/")
    if not name or url.endswith("://" + name):
        raise UsageError("this is not a file to write to", where=url, hint="name a file")
    return ((head or "/") if slash else "."), name


# What a conversion is asked for, as one value that its parts hand on. Pure.


class MergeKeywords(TypedDict, total=False):
    """Those fields of ``ConvertOptions`` that a merge of checkpoints takes too, as keywords of a call."""

    views: Views | None
    only: Sequence[str]
    exclude: Sequence[str]
    optimizer: bool
    dtype: str | None
    root: str | None
    skip: Sequence[str]
    shard_size: int | None
    memory: int
    threads: int | None
    overwrite: bool
    verify: bool
    config: str | os.PathLike[str] | None
    require_config: bool


class ConvertKeywords(MergeKeywords, total=False):
    """The fields of ``ConvertOptions`` as keywords of a call."""

    parallel: MegatronParallel | None
    repair: bool
    job: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertOptions(SelectOptions):
    """See ``converters.convert.convert``, which explains each of them."""

    shard_size: int | None = None
    parallel: MegatronParallel | None = None
    memory: int = settings.CONVERT_MEMORY
    threads: int | None = None
    overwrite: bool = False
    verify: bool = False
    repair: bool = False
    job: Mapping[str, int] = field(default_factory=dict)
    config: str | os.PathLike[str] | None = None
    require_config: bool = False


def check_sizes(**given: object) -> None:
    """Raise UsageError unless these are numbers of bytes, or None."""
    for name, value in given.items():
        if value is not None:
            settings.check_whole(value, f"{name}=, in bytes,", 1, f"{name}=1 << 30")
