"""Lightning's strategies for sharded models on ckpt: a fit that was stopped goes on alike, also on other numbers of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.engine.verify import verify


def ranks(folder: Path, number: int, life: str) -> list[dict[str, Any]]:
    """What each rank told."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}"]
    here = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    script = str(Path(__file__).parent / "sharded_fits.py")
    ended = subprocess.run([*command, script, str(folder), life], env=here, capture_output=True, text=True, timeout=500, check=False)
    told = [json.loads(line[5:]) for line in ended.stdout.splitlines() if line.startswith("TOLD ")]
    assert len(told) == number, ended.stdout[-2000:] + ended.stderr[-4000:]
    return told


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sharded_fit_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    began = ranks(tmp_path, 2, "begin")
    for kind in ("parallel", "fsdp"):
        for told in began:
            whole = told[f"{kind} whole"]
            assert list(whole) == list("0123456") and told[f"{kind} first"] == {n: whole[n] for n in "01234"}
            assert told[f"{kind} again"] == {n: whole[n] for n in "456"}, "weights, moments and rate, to the last bit"
        left = sorted(path.name for path in (tmp_path / kind / "first").iterdir())
        assert left == ["epoch=0-step=4.ckpt", "last.ckpt"] and all(verify(str(tmp_path / kind / "first" / name)).ok for name in left)
        view = ckpt.open(str(tmp_path / kind / "first" / "last.ckpt"))
        assert view.state()["trainer"]["global_step"] == 4 and view["model.net.0.weight"].shape == (16, 8)
    for number in (1, 3):
        for told in ranks(tmp_path, number, "resume"):
            assert told["parallel again"]["4"] == began[0]["parallel whole"]["4"]
            assert list(told["parallel again"]) == list(told["fsdp again"]) == list("456")
