"""What killed saves leave behind is removed by the next save to the same place, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.formats.native.paths import id_of
from ckpt.io_backends.faulty import Fault, FaultyProcess, SimulatedCrash
from ckpt.io_backends.registry import wrap_backends


def files(root: Path) -> set[str]:
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}


def reached(root: Path) -> set[str]:
    catalog = ckpt.open(str(root))._catalog
    return {f.path for f in catalog.files} | {f.path for f in catalog.record.index.values()} | {"checkpoint.json"}


@pytest.mark.parametrize("committed_before", [False, True])
def test_the_next_save_removes_what_a_crash_left(tmp_path: Path, *, committed_before: bool) -> None:
    root = tmp_path / "a"  # in a run of its own: a neighbour that cannot be read might refer to anything
    root.mkdir()
    state = {"a": torch.arange(1000), "n": 1}
    if committed_before:
        ckpt.save(str(root), state)
    before = files(root)
    count = FaultyProcess()
    with wrap_backends(count.wrap):
        ckpt.save(str(root / "elsewhere"), state)
    crash = FaultyProcess(Fault(at=count.log.index("put_if checkpoint.json"), kind="crash"))  # before it commits: all is written
    with wrap_backends(crash.wrap), pytest.raises(SimulatedCrash):
        ckpt.save(str(root), state)
    assert files(root) - before, "the crash was meant to leave something"
    (root / "data" / "notes.txt").write_text("not ours")
    ckpt.save(str(root), state)
    ours = {p for p in files(root) if not p.startswith("elsewhere")}
    assert ours == reached(root) | {"data/notes.txt"}


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("index-0mwpsxo3h46af2rm/tensors.arrow", "0mwpsxo3h46af2rm"),
        ("data/0mwpsxo3h46af2rm-00000.safetensors", "0mwpsxo3h46af2rm"),
        ("data/0mwpsxo3h46af2rm-100000-3.safetensors", "0mwpsxo3h46af2rm"),
        ("data/model.safetensors", None),
        ("data/short-00000.safetensors", None),
        ("index-0mwpsxo3h46af2rm", None),
        ("checkpoint.json", None),
        ("notes/index-0mwpsxo3h46af2rm/tensors.arrow", None),
    ],
)
def test_only_paths_of_the_format_have_an_id(path: str, found: str | None) -> None:
    assert id_of(path) == found
