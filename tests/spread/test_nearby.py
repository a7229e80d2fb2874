"""Which files of the nodes are on this machine: what shared reads are divided by."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from ckpt.formats.native.paths import RunBackend
from ckpt.io_backends import Backend, open_backend
from ckpt.io_backends.registry import join_url
from ckpt.nodes.backend import register_run, run_url, unregister_run
from ckpt.nodes.nodes import NodeSet, StorageNode

FILE = "data/0mwtkbhqxvz7aeg3-0000{}.safetensors"


def below(root: Path, prefix: str) -> Backend:
    return open_backend(join_url(str(root), prefix.rstrip("/")) if prefix else str(root))


def test_nearby_is_what_the_nodes_of_this_machine_have(tmp_path: Path) -> None:
    """Memory and disk of this machine, and what a reference leads to there; not the other machine, and nothing that is missing."""
    nodes = [
        StorageNode(name=name, domain=host, host=host, below=partial(below, tmp_path / name))
        for name, host in (("memory", "here"), ("disk", "here"), ("far", "there"))
    ]
    for node, step, number in (("memory", 2, 0), ("disk", 2, 1), ("far", 2, 2), ("far", 2, 0), ("disk", 1, 0), ("far", 1, 1)):
        file = tmp_path / node / f"step-{step}" / FILE.format(number)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x")
    run = NodeSet(url=run_url("nearby"), nodes=nodes, own=0, copies=1)
    register_run(run)
    try:
        own = [FILE.format(n) for n in range(4)]
        references = [f"../step-1/{FILE.format(n)}" for n in range(2)]
        step = open_backend(f"{run.url}/step-2")
        assert {*(step.nearby(own) or ())} == {*own[:2]}
        assert {*(RunBackend(step).nearby([*own, *references]) or ())} == {*own[:2], references[0]}
    finally:
        unregister_run(run)


def test_a_storage_that_all_reach_alike_has_nothing_near(tmp_path: Path) -> None:
    backend = open_backend(str(tmp_path))
    assert backend.nearby(["a"]) is None and RunBackend(backend).nearby(["a"]) is None
