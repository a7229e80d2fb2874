"""Ways to spoil a checkpoint in a directory, and to make its chain of digests valid again afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

INDEX = ("tensors.arrow", "grids.arrow", "files.arrow", "state.json")


def record(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "checkpoint.json").read_bytes())
    return found


def write_record(directory: Path, members: dict[str, Any]) -> None:
    """Write a commit record with a digest that is right, whatever else it says (docs/format.md §2)."""
    data = json.dumps({**members, "digest": "0" * 32}).encode()
    (directory / "checkpoint.json").write_bytes(data.replace(b"0" * 32, xxhash.xxh3_128_hexdigest(data).encode()))


def change_record(directory: Path, **members: Any) -> None:
    """Change members of the commit record; its digest is made right."""
    write_record(directory, {**record(directory), **members})


def index_file(directory: Path, name: str) -> Path:
    return directory / str(record(directory)["index"][name]["path"])


def write_index(directory: Path, name: str, data: bytes) -> None:
    """Replace an index file; the record's size and digest of it, and the record's own digest, are made right."""
    members = record(directory)
    entry = members["index"][name]
    (directory / entry["path"]).write_bytes(data)
    entry.update(size=len(data), digest=xxhash.xxh3_128_hexdigest(data))
    write_record(directory, members)


def data_file(directory: Path) -> Path:
    """The only data file."""
    (found,) = (directory / "data").iterdir()
    return found


def header(path: Path) -> tuple[dict[str, Any], int]:
    """The JSON of a data file's header, and where the data start."""
    data = path.read_bytes()
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
