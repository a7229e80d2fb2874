"""The object in one file of DeepSpeed, with checks on what is taken out of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from ckpt.concurrency.workers import map_tasks
from ckpt.errors import CorruptError, FormatError
from ckpt.formats.pickles.stand_ins import Made
from ckpt.formats.pickles.stored import Size, StoredView, counts
from ckpt.formats.torchzip.archive import Archive, open_archive

if TYPE_CHECKING:
    from ckpt.io_backends.protocol import Backend

_THREADS = 16


class PickledFile:
    """``whole`` is what was saved, with stand-ins; ``file`` the number of the file."""

    def __init__(self, archive: Archive, path: str, file: int) -> None:
        self.archive = archive
        self.path = path
        self.file = file
        self.where = archive.where
        self.whole = archive.values.meaning(archive.load())

    @property
    def root(self) -> dict[Any, Any]:
        """What was saved, which has to be a mapping."""
        return self.mapping(self.whole, "its contents")

    def damaged(self, what: str) -> NoReturn:
        raise CorruptError(what, where=self.where, hint="the file is damaged, or of a version of DeepSpeed that is not known here")

    def unknown(self, what: str) -> NoReturn:
        raise FormatError(f"{what}, which is not known here", where=self.where, hint="load it with DeepSpeed and save it with ckpt")

    def mapping(self, value: Any, what: str) -> dict[Any, Any]:
        """A dict, or what was one."""
        meant = self.archive.values.meaning(value)
        return meant if isinstance(meant, dict) else self.damaged(f"{what} should be a mapping, not {_kind(value)}")

    def optional(self, value: Any, what: str) -> dict[Any, Any]:
        """A dict, or an empty one for None."""
        return {} if value is None else self.mapping(value, what)

    def sequence(self, value: Any, what: str) -> list[Any]:
        """A list or tuple."""
        meant = self.archive.values.meaning(value)
        return list(meant) if isinstance(meant, (list, tuple)) else self.damaged(f"{what} should be a list, not {_kind(value)}")

    def number(self, value: Any, what: str) -> int:
        """A whole number that is not negative; that of an enumeration, if it is one."""
        if type(value) is Made and len(value.args) == 1:
            (value,) = value.args
        return value if type(value) is int and value >= 0 else self.damaged(f"{what} should be a number, not {_kind(value)}")

    def meaning(self, value: Any) -> Any:
        return self.archive.values.meaning(value)

    def flat(self, value: Any, what: str) -> StoredView:
        """A tensor of one dimension whose elements lie one after another."""
        meant = self.archive.values.meaning(value)
        if type(meant) is not StoredView or len(meant.shape) != 1 or (meant.shape[0] > 1 and meant.strides != (1,)) or meant.lazy:
            self.damaged(f"{what} should be a flat tensor, not {_kind(value)}")
        return meant

    def shapes(self, value: Any, what: str) -> dict[str, tuple[int, ...]]:
        """Parameters and their shapes, in order."""
        shapes = {}
        for name, shape in self.mapping(value, what).items():
            shape = self.archive.values.meaning(shape)
            if type(name) is not str or not name or type(shape) not in (tuple, list, Size):
                self.damaged(f"{what} should be names and shapes")
            try:
                shapes[name] = counts(shape)
            except ValueError as err:
                self.damaged(f"{what} has a shape of {name} that is none ({err})")
            if math.prod(shapes[name]) >= 1 << 58:
                self.damaged(f"{what} has a shape {list(shapes[name])} that no parameter has")
        return shapes


def open_files(backend: Backend, paths: Iterable[str]) -> list[PickledFile]:
    """The objects of many files, several at a time."""
    numbered = list(enumerate(paths))
    return map_tasks(lambda n: PickledFile(open_archive(backend, n[1]), n[1], n[0]), numbered, _THREADS, "ckpt-open")


def _kind(value: Any) -> str:
    return f"{value.name or 'an object'}" if type(value) is Made else type(value).__name__
