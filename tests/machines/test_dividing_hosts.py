"""Offline work divided over several machines: the result of one process, and one voice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

import ckpt
from tests.distributed.test_dividing import Ended, equal, one_voice, run_command, state, tensors_of
from tests.machines.bed import Bed
from tests.machines.jobs import Job

pytestmark = pytest.mark.alone


def commands_here(commands: Sequence[Sequence[str]]) -> list[Ended]:
    return [run_command(command, {}) for command in commands]


def test_three_machines(bed: Bed, tmp_path: Path) -> None:
    source, made = str(tmp_path / "a"), str(tmp_path / "made")
    ckpt.save(source, state())
    convert = ("convert", "--json", "--to", "native", "--shard-size", "20KB", source, made)
    with Job(bed, commands_here, [convert, ("verify", "--json", made)], hosts=(0, 1, 2, 2), store=0) as job:
        ended = job.results(120)
    assert json.loads(one_voice(ended, 0).out)["finished"] and json.loads(one_voice(ended, 1).out)["ok"]
    assert equal(tensors_of(made), tensors_of(source))
