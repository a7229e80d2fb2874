"""Ray Train on ckpt, where ``ray[train]`` is installed: fits that fail, go on with more workers, and lose a node."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_fit_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("ray.train")
    script = str(Path(__file__).parent / "ray_fit.py")
    ended = subprocess.run([sys.executable, script, str(tmp_path)], capture_output=True, text=True, timeout=800, check=False)
    assert "HELD" in ended.stdout, ended.stdout[-2000:] + ended.stderr[-4000:]
