"""What a format that can be converted to has to say, and which there are. No torch.

A target plans before anything is read: which files there will be, how long they are, and where in them every tensor's bytes lie. What
else is in a file (headers, directories) it gives when the digests of the tensors are known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ckpt.converters.select.selection import OutputSet, OutputTensor, SelectOptions
from ckpt.errors import ConflictError, UsageError
from ckpt.needs import attribute, entry_points

from .parallel import MegatronParallel
from .windows import FileItem

if TYPE_CHECKING:
    from ckpt.catalog import Catalog
    from ckpt.io_backends.protocol import Backend

Digest = Literal["xxh3", "crc32"]
Ends = Callable[[Sequence[int]], list[tuple[int, bytes]]]
"""From the digests of the items, in their order, to what else is in the file: bytes and where they begin."""

ENTRY_POINTS = "ckpt.converters"
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


_BUILTIN = {
    "native": "ckpt.converters.targets.native:TARGET",
    "hf": "ckpt.converters.targets.hf:TARGET",
    "torch": "ckpt.converters.targets.torch_file:TARGET",
    "dcp": "ckpt.converters.targets.dcp:TARGET",
    "torch_dist": "ckpt.converters.targets.torch_dist:TARGET",
    "megatron": "ckpt.converters.targets.megatron.ranks:TARGET",
}


def target(name: str) -> Target:
    """The target of this name.

    Raises:
        UsageError: there is none.
    """
    reference = _BUILTIN.get(name)
    if reference is not None:
        builtin: Target = attribute(reference)
        return builtin
    point = entry_points(ENTRY_POINTS).get(name)
    if point is not None:
        given: Target = point.load()
        return given
    raise UsageError(f"cannot convert to {name!r}: no such format", hint=f"one of {', '.join(_BUILTIN)}")


def split_url(url: str, *, file: bool) -> tuple[str, str | None]:
    """The directory that is written to, and the name of the file there if it is one file."""
    return parent_and_name(url) if file else (url, None)


def parent_and_name(url: str) -> tuple[str, str]:
    """The directory of a file, and its name there.

    Raises:
        UsageError: it is no file that the URL names.
    """
    head, slash, name = url.rpartition("/")
    if not name or url.endswith("://" + name):
        raise UsageError("this is no file to write to", where=url, hint="name a file")
    return ((head or "/") if slash else "."), name


def publish_once(backend: Backend, path: str, data: bytes) -> None:
    """Make a small file, unless the same is there: another process may have died after it had made it.

    Raises:
        ConflictError: something else is there.
    """
    try:
        backend.put_if(path, data, expected=None)
    except ConflictError:
        if backend.read(path) != data:
            raise
