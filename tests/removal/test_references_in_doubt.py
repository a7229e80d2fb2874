"""Files of which nobody can say whether another checkpoint needs them stay; and references that lead through links."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch
import xxhash

import ckpt
from ckpt.converters.importer import import_checkpoint
from ckpt.engine.copy import copy_checkpoint
from ckpt.engine.verify import verify
from ckpt.errors import ConflictError
from ckpt.formats.native.commit import CommitRecord
from ckpt.io_backends.registry import open_backend
from ckpt.policies import Latest, retention
from ckpt.runs.orphans import find_orphans, remove_orphans
from ckpt.runs.removal import infos, remove_at, remove_steps
from ckpt.runs.step_listing import list_steps

STATE = {"a": torch.arange(100.0), "b": torch.arange(50.0)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Step 1 has all bytes, step 2 refers to them; step 3 is another one."""
    root = tmp_path / "run"
    ckpt.save(root / "step-1", STATE, reuse=True)
    ckpt.save(root / "step-2", STATE, reuse=root / "step-1")
    ckpt.save(root / "step-3", {"c": torch.ones(3)}, reuse=True)
    return root


def check_loads(url: Path) -> None:
    state = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    ckpt.load(url, state)
    assert all(torch.equal(state[name], tensor) for name, tensor in STATE.items())
    assert not verify(str(url)).problems


def of_a_later_release(data: bytes) -> bytes:
    """The record as a release writes it that has another feature."""
    members = json.loads(data) | {"features": ["references", "deltas-of-deltas"], "digest": "0" * 32}
    changed = json.dumps(members).encode()
    return changed.replace(b"0" * 32, xxhash.xxh3_128_hexdigest(changed).encode())


def going(root: Path, keep: int) -> dict[int, str]:
    """What retention says of each step."""
    return {v.step: str(v) for v in retention(Latest(keep), infos(list_steps(root)), datetime.now(timezone.utc))}


def remove(root: Path, keep: int) -> list[int | None]:
    steps = {s.number: s for s in list_steps(root)}
    facts = infos(list(steps.values()))
    verdicts = retention(Latest(keep), facts, datetime.now(timezone.utc))
    return [s.number for s in remove_steps(str(root), [steps[n] for n in verdicts.removed], {i.step: i.referred_by for i in facts})]


DAMAGED: Callable[[bytes], bytes] = lambda data: data[:-20]  # noqa: E731


@pytest.mark.parametrize("damage", [DAMAGED, of_a_later_release])
def test_a_step_that_cannot_be_read_keeps_its_base(run: Path, damage: Callable[[bytes], bytes]) -> None:
    record = run / "step-2" / "checkpoint.json"
    whole = record.read_bytes()
    record.write_bytes(damage(whole))
    certain = damage is DAMAGED  # its index is whole: only the base stays that it names
    why = "step 2 refers to it" if certain else "step-2 may use it: its record or index cannot be read"
    assert why in going(run, 1)[1]
    ckpt.save(run / "step-4", {"c": torch.ones(3)})
    assert remove(run, 1) == ([3] if certain else [])
    with pytest.raises(ConflictError, match="step-2 refers to it" if certain else "step-2 may refer to it"):
        remove_at(str(run / "step-1"))
    record.write_bytes(whole)  # from a copy, or for the later release
    check_loads(run / "step-2")


def test_orphans_that_a_step_may_need_stay(run: Path) -> None:
    record = run / "step-2" / "checkpoint.json"
    whole = record.read_bytes()
    record.write_bytes(of_a_later_release(whole))
    ckpt.save(run / "step-1", {"c": torch.zeros(3)})  # replaces what step 2 refers to
    backend = open_backend(str(run))
    orphans = find_orphans(backend, older_than=0, now=backend.now() or 0.0)
    assert [(o.removable, o.reason) for o in orphans] == [(False, "step-2 may refer to it: the record or index there cannot be read")]
    remove_orphans(backend, orphans)
    record.write_bytes(whole)
    check_loads(run / "step-2")


def test_other_software_and_runs_without_references_are_in_no_doubt(run: Path) -> None:
    (run / "other").mkdir()
    (run / "other" / "checkpoint.json").write_text('{"format": "another"}')
    ckpt.save(run / "step-5", STATE)
    ckpt.save(run / "step-6", STATE)
    data = (run / "step-6" / "checkpoint.json").read_bytes()
    (run / "step-6" / "checkpoint.json").write_bytes(of_a_later_release(data))
    remove_at(str(run / "step-5"))  # nobody can refer to it
    remove_at(str(run / "step-6"))
    remove_at(str(run / "step-3"))
    assert [s.number for s in list_steps(run) if s.committed] == [1, 2]


def test_a_link_to_a_step_with_references_loads(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "step-7").symlink_to(run / "step-2")
    (run / "latest").symlink_to("step-2")
    check_loads(other / "step-7")
    check_loads(run / "latest")
    assert [s.sources for s in list_steps(other)] == [(str(run / "step-1"),)]
    copy_checkpoint(other / "step-7", tmp_path / "copy")
    check_loads(tmp_path / "copy")


def test_a_base_that_was_moved_away_behind_a_link_stays_as_long_as_it_is_needed(run: Path, tmp_path: Path) -> None:
    ckpt.save(run / "step-4", STATE, reuse=run / "step-2")
    (run / "step-2").rename(tmp_path / "cold-2")  # it refers to step 1 itself, which stays here
    (run / "step-2").symlink_to(tmp_path / "cold-2")
    check_loads(run / "step-2")
    (run / "step-1").rename(tmp_path / "cold")
    (run / "step-1").symlink_to(tmp_path / "cold")
    (run / "latest").symlink_to("step-3")
    check_loads(run / "step-4")
    with pytest.raises(ConflictError, match="step-2, step-4 refer to it"):
        remove_at(str(run / "step-1"))
    step = next(s for s in list_steps(run) if s.number == 1)
    assert remove_steps(str(run), [replace(step)], {}) == []
    check_loads(run / "step-4")
    remove_at(str(run / "latest"))
    for name in ("step-4", "step-2", "step-1"):
        remove_at(str(run / name))
    assert not os.path.lexists(run / "step-1") and (tmp_path / "cold" / "checkpoint.json").exists()
    assert CommitRecord.from_bytes((tmp_path / "cold" / "checkpoint.json").read_bytes(), "").reusable


def test_a_save_over_a_step_that_is_not_reusable_keeps_what_a_virtual_one_points_into(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ckpt.save(run / "step-1", STATE)
    import_checkpoint(str(run / "step-1"), str(run / "step-2"))
    for _ in range(2):
        ckpt.save(run / "step-1", {"c": torch.ones(3)})
    backend = open_backend(str(run))
    remove_orphans(backend, find_orphans(backend, older_than=0, now=backend.now() or 0.0))
    check_loads(run / "step-2")
    remove_at(str(run / "step-2"))
    remove_orphans(backend, find_orphans(backend, older_than=0, now=backend.now() or 0.0))
    assert len(list((run / "step-1").rglob("*.safetensors"))) == 1


def test_files_that_a_virtual_checkpoint_points_into_stay(run: Path) -> None:
    """Step 3 becomes a virtual step 2; then the steps are replaced that have its bytes, and nobody refers to the older ones."""
    remove_at(str(run / "step-3"))
    import_checkpoint(str(run / "step-2"), str(run / "step-3"))
    for step in (1, 2):
        ckpt.save(run / f"step-{step}", {"c": torch.ones(3)}, reuse=True)
    backend = open_backend(str(run))
    remove_orphans(backend, find_orphans(backend, older_than=0, now=backend.now() or 0.0))
    check_loads(run / "step-3")
    with pytest.raises(ConflictError, match="step-3 refers to it"):
        remove_at(str(run / "step-1"))
    remove_at(str(run / "step-3"))
    remove_orphans(backend, find_orphans(backend, older_than=0, now=backend.now() or 0.0))
    assert len(list(run.rglob("*.safetensors"))) == 2
