"""What the memory of this machine and that of another have in common: objects by path, and what their daemon says of each."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

from ckpt.io_backends.checks import check_path, check_prefix
from ckpt.io_backends.protocol import Backend, IOHints, ObjectMeta
from ckpt.memory.objects import MemoryObject


class ObjectsBackend(Backend):
    """Objects of a daemon below ``root``."""

    def __init__(self, root: str) -> None:
        self._root = check_path(root) if root else ""

    @property
    def io_hints(self) -> IOHints:
        """See ``Backend.io_hints``."""
        return IOHints(in_memory=True)

    def _key(self, path: str) -> str:
        return f"{self._root}/{check_path(path)}" if self._root else check_path(path)

    @abstractmethod
    def _stat(self, path: str) -> MemoryObject:
        """What the daemon says of an object. Raises NotFoundError if there is none."""

    @abstractmethod
    def _list(self, prefix: str) -> Sequence[MemoryObject]:
        """Objects of the daemon whose path starts with ``prefix``, sorted."""

    def size(self, path: str) -> int:
        """See ``Backend.size``."""
        return self._stat(path).size

    def modified(self, path: str) -> float:
        """See ``Backend.modified``; by the clock of the daemon's machine."""
        return self._stat(path).modified

    def version_token(self, path: str) -> str:
        """See ``Backend.version_token``."""
        return self._stat(path).version

    def list_prefix(self, prefix: str = "") -> Iterator[ObjectMeta]:
        """See ``Backend.list_prefix``. The objects are those of the moment of the call."""
        below = f"{self._root}/" if self._root else ""
        return iter([ObjectMeta(known.path.removeprefix(below), known.size) for known in self._list(below + check_prefix(prefix))])

    def list_dir(self, prefix: str = "") -> list[str]:
        """See ``Backend.list_dir``."""
        directory = check_prefix(prefix).removesuffix("/")
        start = f"{directory}/" if directory else ""
        heads = (entry.path.removeprefix(start).partition("/") for entry in self.list_prefix(start))
        return sorted({name + slash for name, slash, _ in heads})
