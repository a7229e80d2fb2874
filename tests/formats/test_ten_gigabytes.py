"""One tensor out of a foreign checkpoint of 10 GB and thousands of stored parts: what is read beside its bytes. The files are holes but for
what the libraries write around elements."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.converters.importer import import_checkpoint
from tests.formats.reading import counted
from tests.formats.sparse import MAKERS, can_make, stored_bytes

LARGE = 10_000_000_000
PARTS = 4096

pytestmark = [
    pytest.mark.skipif(not can_make(), reason="this torch always writes the elements"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.mark.parametrize("kind", MAKERS)
def test_one_tensor(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "source"
    root.mkdir()
    name = MAKERS[kind](root, LARGE, PARTS)
    sizes, taken = (sum(column) for column in zip(*stored_bytes(root), strict=True))
    if taken > 100 << 20:
        pytest.skip("this file system has no holes")
    assert sizes > 0.95 * LARGE
    with counted() as counts:
        tensor = ckpt.open(str(root))[name].read()
    assert 500_000 < tensor.nbytes < counts.bytes <= tensor.nbytes + (1 << 20)
    assert tensor.dtype in (torch.bfloat16, torch.float32) and not tensor.any()
    with counted() as counts:
        report = import_checkpoint(str(root), str(tmp_path / "imported"))
    assert counts.bytes < 24 << 20 and report.tensor_bytes > 0.95 * LARGE and report.chunks >= PARTS
    with counted() as counts:
        again = ckpt.open(str(tmp_path / "imported"))[name].read()
    assert torch.equal(again, tensor) and counts.bytes <= tensor.nbytes + (1 << 20)
