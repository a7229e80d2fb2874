"""The index of a Hugging Face directory: which file has which tensor. The same for safetensors and for ``.bin`` shards. And many small
ranges of files, read at once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ckpt import settings
from ckpt.concurrency import COUNTS_WAITS, map_tasks, run_tasks, waits_so_far
from ckpt.errors import CorruptError, FormatError, NotFoundError
from ckpt.formats.native.paths import path_problem
from ckpt.plan.reads import RangeGroup, group_ranges
from ckpt.text import parse_json

from .base import SingleFile

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend


_SHOWN = 5
_THREADS = 16


def find_index(names: Sequence[str], suffix: str, url: str) -> str | None:
    """The index among the ``names`` of a directory, which end in ``suffix``; None if there is none."""
    indexes = [name for name in names if name.endswith(suffix)]
    plain = [name for name in indexes if name.count(".") == suffix.count(".")]
    if len(indexes) > 1 and len(plain) != 1:
        raise FormatError(f"there are several indexes: {', '.join(indexes)}", where=url, hint=f"open one of them: {url}/{indexes[0]}")
    return next(iter(plain or indexes), None)


def read_index(backend: Backend, path: str) -> dict[str, str]:
    """Name of a tensor → file that has it, relative to the root."""
    where = f"{backend.url.rstrip('/')}/{path}"
    try:
        weight_map = parse_json(backend.read_whole(path, settings.FOREIGN_TABLE))["weight_map"]
        pairs = {str(k): v for k, v in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        hint = "get the file again, or open the shards without it"
        raise CorruptError(f"the index is damaged: {type(err).__name__}: {err}", where=where, hint=hint) from err
    for name, file in pairs.items():
        problem = path_problem(file) if isinstance(file, str) else f"{file!r:.40} is no path"
        if problem is not None:
            raise CorruptError(f"the index has {name!r} in a file that cannot be: {problem}", where=where, hint="get the file again")
    return pairs


def sizes_of(backend: Backend, paths: Sequence[str]) -> list[int]:
    """The sizes of files that a checkpoint names."""

    def size_of(path: str) -> int | None:
        try:
            return backend.size(path)
        except NotFoundError:
            return None

    sizes = map_tasks(size_of, paths, _THREADS, "ckpt-open")
    missing = [path for path, size in zip(paths, sizes, strict=True) if size is None]
    if missing:
        hint = "copy the directory again"
        raise CorruptError(f"files of the checkpoint are missing: {shown(missing)}", where=backend.url, hint=hint)
    return [size for size in sizes if size is not None]


def check_index(index: Mapping[str, str], located: Mapping[str, str], where: str) -> None:
    """Compare the index with what the files have: name → file, both."""
    if dict(index) == dict(located):
        return
    lines = [f"{n} should be in {f} and is in {located[n]}" for n, f in index.items() if n in located and located[n] != f]
    absent = [n for n in index if n not in located]
    extra = [n for n in located if n not in index]
    lines += [f"in no file: {shown(absent)}"] if absent else []
    lines += [f"not in the index: {shown(extra)}"] if extra else []
    hint = "the directory mixes two models, or its copy is not complete: copy it again, or remove the index"
    raise CorruptError(f"index and files disagree: {'; '.join(lines[:_SHOWN])}", where=where, hint=hint)


_SHARD = re.compile(r"(?:shard-\d+-)?(.*?)(\d{1,6})-of-(\d{1,6})(\D.*)", re.ASCII)
"""Names that say how many files there are. Those that begin with a shard's number may share the numbers that follow."""


def check_all_there(backend: Backend, paths: Sequence[str]) -> None:
    """What the names of shards say of each other, where no index says it. A file that was given alone may be one of several."""
    groups: dict[tuple[str, str, str], dict[int, str]] = {}
    for match in filter(None, map(_SHARD.fullmatch, paths)):
        groups.setdefault((match[1], match[3], match[4]), {})[int(match[2])] = match[2]
    missing = []
    for (begin, count, end), numbers in groups.items():
        first, digits = 0 if 0 in numbers else 1, max(map(len, numbers.values()))
        missing += [f"{begin}{n:0{digits}}-of-{count}{end}" for n in range(first, first + int(count)) if n not in numbers]
    if missing and not isinstance(backend, SingleFile):
        hint = "copy the directory again; to read the tensors of one file, give the file's own URL"
        raise CorruptError(f"files are missing: {shown(missing)}", where=backend.url, hint=hint)


def shown(names: Sequence[str]) -> str:
    """A few of many names."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# Many small ranges of files at once: near ones in one read, several reads at a time. For headers and directories of foreign files.


class Range(NamedTuple):
    """Bytes of a file."""

    path: str
    offset: int
    length: int


def read_ranges(backend: Backend, ranges: Sequence[Range]) -> list[bytes]:
    """The bytes of each range, in the order asked for."""
    groups = group_ranges(ranges, max_bytes=settings.GROUPED_READ, max_gap=settings.GAP)
    contents: list[bytes] = [b""] * len(ranges)

    def read(group: RangeGroup) -> None:
        data = backend.read(group.path, group.offset, group.length)
        for i in group.members:
            at = ranges[i].offset - group.offset
            contents[i] = data[at : at + ranges[i].length]

    at, waits = 0, waits_so_far()
    while at < len(groups) and COUNTS_WAITS and not backend.io_hints.concurrency and waits_so_far() - waits <= at // 8:
        read(groups[at])  # one thread is the fastest as long as nothing has to be waited for
        at += 1
    run_tasks([partial(read, group) for group in groups[at:]], _THREADS, "ckpt-open")
    return contents
