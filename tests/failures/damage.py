"""Ways to spoil a checkpoint, and to make its chain of digests valid again afterwards: on disk, or a copy in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from ckpt.io_backends.registry import open_backend

INDEX = ("tensors.arrow", "grids.arrow", "files.arrow", "state.json")

# ---------------------------------------------------------------------------------------------------------------- on disk


def sealed(members: Any) -> bytes:
    """A commit record with a digest that is right, whatever else it says (docs/format.md §2)."""
    data = json.dumps({**members, "digest": "0" * 32} if isinstance(members, dict) else members).encode()
    return data.replace(b"0" * 32, xxhash.xxh3_128_hexdigest(data).encode())


def record(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "checkpoint.json").read_bytes())
    return found


def change_record(directory: Path, **members: Any) -> None:
    """Change members of the commit record; its digest is made right."""
    (directory / "checkpoint.json").write_bytes(sealed({**record(directory), **members}))


def index_file(directory: Path, name: str) -> Path:
    return directory / str(record(directory)["index"][name]["path"])


def data_file(directory: Path) -> Path:
    """The only data file."""
    (found,) = (directory / "data").iterdir()
    return found


def header(data: bytes) -> tuple[dict[str, Any], int]:
    """The JSON of a data file's header, and where the data start."""
    start = 8 + int.from_bytes(data[:8], "little")
    found: dict[str, Any] = json.loads(data[8:start])
    return found, start


def flip(path: Path, at: int) -> None:
    """Change one bit of byte ``at``."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


# -------------------------------------------------------------------------------------------------------------- in memory


class Copy:
    """A checkpoint in memory that is spoiled again and again. ``files`` has its bytes as they were; ``restore`` goes back to them.

    Whoever changes an index file or a header through the methods below gets digests that are right all the way up.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.backend = open_backend(url)
        self.files = {e.path: self.backend.read(e.path) for e in self.backend.list_prefix()}
        self.members: dict[str, Any] = {}
        self.restore()

    @classmethod
    def of(cls, directory: str | Path, url: str) -> Copy:
        """A copy of a checkpoint on disk."""
        for entry in (disk := open_backend(str(directory))).list_prefix():
            _put(url, entry.path, disk.read(entry.path))
        return cls(url)

    def restore(self) -> None:
        for entry in list(self.backend.list_prefix()):
            if self.files.get(entry.path) != self.backend.read(entry.path):
                self.backend.delete(entry.path)
        for path in self.files.keys() - {e.path for e in self.backend.list_prefix()}:
            self.put(path, self.files[path])
        self.members = json.loads(self.files["checkpoint.json"])

    def put(self, path: str, data: bytes) -> None:
        _put(self.url, path, data)

    def commit(self, members: Any = None) -> None:
        """Write the commit record: as ``set_index`` left it, or with these members."""
        self.put("checkpoint.json", sealed(self.members if members is None else members))

    # ---- the index

    def index(self, name: str) -> bytes:
        return self.files[json.loads(self.files["checkpoint.json"])["index"][name]["path"]]

    def set_index(self, name: str, data: bytes) -> None:
        entry = self.members["index"][name]
        self.put(entry["path"], data)
        entry.update(size=len(data), digest=xxhash.xxh3_128_hexdigest(data))
        self.commit()

    def table(self, name: str) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = self.arrow(name).to_pydict()
        return found

    def arrow(self, name: str) -> pa.Table:
        return pa.ipc.open_file(self.index(name)).read_all()

    def set_table(self, name: str, columns: dict[str, list[Any]]) -> None:
        """Replace a table; a column that no longer has the type of the format gets the one that fits."""
        types = {field.name: field.type for field in self.arrow(name).schema}
        self.set_index(name, arrow_file({c: _column(values, types[c]) for c, values in columns.items()}))

    def set_row(self, table: str, number: int, /, **values: Any) -> None:
        """Change cells of one row."""
        columns = self.table(table)
        for column, value in values.items():
            columns[column][number] = value
        self.set_table(table, columns)

    def row(self, tensor: str) -> int:
        """The row of a tensor."""
        return self.table("tensors.arrow")["name"].index(tensor)

    def state(self) -> Any:
        return json.loads(self.index("state.json"))

    def set_state(self, document: Any) -> None:
        self.set_index("state.json", document if isinstance(document, bytes) else json.dumps(document).encode())

    # ---- data files

    def data_path(self, number: int = 0) -> str:
        return str(self.table("files.arrow")["path"][number])

    def header(self, number: int = 0) -> dict[str, Any]:
        return header(self.files[self.data_path(number)])[0]

    def set_header(self, number: int, text: bytes, length: int | None = None) -> None:
        """Replace the JSON of a header, padded as it must be; ``length`` is what its first eight bytes say, by default the truth."""
        path = self.data_path(number)
        data = self.files[path]
        size = -(-(8 + len(text)) // 4096) * 4096
        head = (size - 8 if length is None else length).to_bytes(8, "little") + text.ljust(size - 8)
        data = head + data[header(data)[1] :]
        self.put(path, data)
        self.set_row("files.arrow", number, size=len(data), header=size, digest=xxhash.xxh3_128_hexdigest(head))


def _put(url: str, path: str, data: bytes) -> None:
    backend = open_backend(url)
    backend.delete(path)
    with backend.create(path, len(data)) as writer:
        writer.write(0, [data])
        writer.commit()


def arrow_file(columns: dict[str, pa.Array]) -> bytes:
    table, sink = pa.table(columns), pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    for attempt in (lambda: pa.array(values, kind), lambda: pa.array(values)):
        try:
            return attempt()
        except (pa.ArrowException, OverflowError, UnicodeEncodeError):
            continue
    return pa.array([ascii(v) for v in values])


def places(node: Any, at: tuple[Any, ...] = ()) -> Iterable[tuple[Any, ...]]:
    """The way to every value of a JSON document, its own included."""
    yield at
    for key, child in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from places(child, (*at, key))
