"""Saves whose chunks are stored as differences from an earlier checkpoint, their anchor."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.catalog import Extent
from ckpt.converters.convert import convert
from ckpt.engine.copy import copy_checkpoint
from ckpt.engine.verify import verify
from ckpt.errors import CkptError, ConflictError, CorruptError, FormatError, UsageError
from ckpt.formats.native import commit
from ckpt.formats.native.catalog import NativeCatalog
from ckpt.formats.native.commit import CommitRecord
from ckpt.formats.native.rebuild import rebuild_checkpoint
from ckpt.formats.registry import open_catalog
from ckpt.io_backends.registry import open_backend
from ckpt.policies import Anchor, EverySteps, Latest
from ckpt.runs.removal import remove_at
from tests.formats import oracle

XOR = "xor-planes-zstd"
State = dict[str, torch.Tensor]


def state_of(seed: int = 0) -> State:
    """Weights as a model has them; ``other`` has nothing in common with that of another seed."""
    torch.manual_seed(0)
    state = {"w": torch.randn(300, 200) * 0.02, "half": (torch.randn(200, 400) * 0.02).bfloat16(), "tiny": torch.randn(5)}
    torch.manual_seed(100 + seed)
    return state | {"other": torch.randn(70, 100)}


def moved(state: State, amount: float = 1e-5) -> State:
    """One step of training later."""
    torch.manual_seed(9)
    return {name: (t.float() + amount * torch.randn(t.shape)).to(t.dtype) for name, t in state.items()} | {"other": torch.randn(70, 100)}


def codecs(url: Path) -> dict[str, str | None]:
    catalog = open_catalog(str(url))
    return {name: catalog.extents(entry, [0])[0].codec for name, entry in catalog.tensors.items()}


def own_bytes(url: Path) -> int:
    return sum(f.stat().st_size for f in (url / "data").glob("*"))


def features(url: Path) -> tuple[str, ...]:
    return CommitRecord.from_bytes((url / "checkpoint.json").read_bytes(), "").features


def holds(url: Path, state: State) -> None:
    """Every tensor is there bit for bit: loaded, opened, verified, and read by a reader that was written from the specification alone."""
    target = {name: torch.zeros_like(t) for name, t in state.items()}
    ckpt.load(url, target)
    view, other = ckpt.open(str(url)), oracle.read(url)
    for name, tensor in state.items():
        raw = tensor.view(torch.uint8).numpy().tobytes()
        assert target[name].view(torch.uint8).numpy().tobytes() == raw, name
        assert torch.as_tensor(view[name][...]).view(torch.uint8).numpy().tobytes() == raw, name
        assert other[name][2] == raw, name
    assert not verify(str(url)).problems


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def two(run: Path) -> tuple[Path, State, State]:
    """A run of an anchor and a step that is stored as differences from it, and what these hold."""
    first = state_of()
    second = moved(first)
    ckpt.save(run / "step-1", first, codec=XOR)
    ckpt.save(run / "step-2", second, codec=XOR, reuse=run / "step-1")
    return run, first, second


def test_chunks_that_gain_by_it_are_differences_and_the_others_are_not(two: tuple[Path, State, State]) -> None:
    run, first, second = two
    assert codecs(run / "step-1") == {"w": "planes-zstd", "half": "planes-zstd", "tiny": None, "other": "planes-zstd"}
    assert codecs(run / "step-2") == {"w": XOR, "half": XOR, "tiny": None, "other": "planes-zstd"}
    assert features(run / "step-1") == ("codecs",)
    assert features(run / "step-2") == ("codecs", "references", "anchors")
    assert own_bytes(run / "step-2") < 0.8 * own_bytes(run / "step-1")
    holds(run / "step-1", first)
    holds(run / "step-2", second)
    part = ckpt.open(str(run / "step-2"))["w"][10:20, 3:7]
    assert torch.equal(torch.as_tensor(part), second["w"][10:20, 3:7])


def test_what_did_not_change_is_referred_to_and_what_did_is_a_difference(run: Path) -> None:
    first = state_of()
    second = moved(first) | {"half": first["half"]}
    ckpt.save(run / "step-1", first, codec=XOR)
    assert ckpt.save(run / "step-2", second, codec=XOR, reuse=run / "step-1").reused_bytes == first["half"].nbytes
    assert codecs(run / "step-2")["w"] == XOR
    holds(run / "step-2", second)


def test_the_codec_of_the_anchor_does_not_matter(run: Path) -> None:
    first = state_of()
    for number, codec in enumerate((None, "zstd")):
        ckpt.save(run / f"step-{number}", first, codec=codec, reuse=True)
        ckpt.save(run / f"step-{number + 5}", moved(first), codec=XOR, reuse=run / f"step-{number}")
        assert codecs(run / f"step-{number + 5}")["w"] == XOR
        holds(run / f"step-{number + 5}", moved(first))


def test_a_background_save_stores_what_the_state_was(run: Path) -> None:
    first = state_of()
    ckpt.save(run / "step-1", first, codec=XOR)
    second = moved(first)
    wanted = {name: t.clone() for name, t in second.items()}
    handle = ckpt.save_async(run / "step-2", second, codec=XOR, reuse=run / "step-1")
    ckpt.fence()
    for tensor in second.values():
        tensor.zero_()
    handle.result()
    assert codecs(run / "step-2")["w"] == XOR
    holds(run / "step-2", wanted)


def test_no_difference_is_taken_from_a_difference(two: tuple[Path, State, State]) -> None:
    run, _, second = two
    third = moved(second, 1e-6)
    ckpt.save(run / "step-3", third, codec=XOR, reuse=run / "step-2")
    assert codecs(run / "step-3")["w"] == "planes-zstd"
    holds(run / "step-3", third)
    shutil.rmtree(run / "step-2")
    assert not verify(str(run / "step-3")).problems or "references" in features(run / "step-3")


def test_an_anchor_that_nothing_may_refer_to_is_not_taken(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = state_of()
    ckpt.save(run / "step-1", first)
    ckpt.save(run / "step-2", moved(first), codec=XOR, reuse=run / "step-1")
    assert "saved without reuse=True" in caplog.text
    assert features(run / "step-2") == ("codecs",)
    holds(run / "step-2", moved(first))


def test_readers_that_do_not_know_anchors_refuse_them_by_name(two: tuple[Path, State, State], monkeypatch: pytest.MonkeyPatch) -> None:
    run, _, _ = two
    monkeypatch.setattr(commit, "FEATURES", commit.FEATURES - {commit.ANCHORS})
    with pytest.raises(FormatError, match="'anchors'"):
        ckpt.open(str(run / "step-2"))


# ---------------------------------------------------------------------------------------------------- damage and loss


def damage(url: Path, name: str) -> None:
    """Flip a bit in the middle of a stored chunk."""
    extent = open_catalog(str(url)).extents(open_catalog(str(url)).tensors[name], [0])[0]
    data = bytearray((url / extent.path).read_bytes())
    data[extent.offset + extent.length // 2] ^= 1
    (url / extent.path).write_bytes(data)


def test_a_damaged_anchor_is_named(two: tuple[Path, State, State]) -> None:
    run, _, second = two
    damage(run / "step-1", "w")
    with pytest.raises(CorruptError, match="tensor w is damaged") as raised:
        ckpt.load(run / "step-2", second)
    assert "../step-1/data/" in str(raised.value)
    (problem,) = verify(str(run / "step-2")).problems
    assert problem.tensor == "w" and "damaged" in problem.message


def test_verify_counts_the_bytes_of_anchors(two: tuple[Path, State, State]) -> None:
    run, _, _ = two
    stored = [e for url in (run / "step-1", run / "step-2") for e in _extents(url)]
    anchors = [e.anchor.extent.length for e in _extents(run / "step-2") if e.anchor is not None]
    shown: list[tuple[int, int]] = []
    reports = [verify(str(run / name), progress=lambda *done: shown.append(done)) for name in ("step-1", "step-2")]
    assert len(anchors) == 2
    assert sum(r.bytes for r in reports) == sum(e.length for e in stored) + sum(anchors)
    assert shown[-1] == (reports[1].bytes, reports[1].bytes)


def _extents(url: Path) -> list[Extent]:
    catalog = open_catalog(str(url))
    return [extent for entry in catalog.tensors.values() for extent in catalog.extents(entry, range(len(entry.grid)))]


def test_an_anchor_that_vanished_is_named(two: tuple[Path, State, State]) -> None:
    run, _, second = two
    shutil.rmtree(run / "step-1")
    with pytest.raises(CorruptError, match="which step-1 should have"):
        ckpt.load(run / "step-2", second)
    assert any("../step-1/" in str(p) for p in verify(str(run / "step-2")).problems)


def test_a_damaged_anchor_fails_a_save_that_names_it(run: Path) -> None:
    first = state_of()
    ckpt.save(run / "step-1", first, codec=XOR)
    damage(run / "step-1", "w")
    with pytest.raises(CorruptError, match="tensor w is damaged"):
        ckpt.save(run / "step-2", moved(first), codec=XOR, reuse=run / "step-1")
    assert not (run / "step-2" / "checkpoint.json").exists()
    assert not list((run / "step-2").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda anchors: None, "no file has its anchor"),
        (lambda anchors: np.full_like(anchors, -1), "no file has its anchor"),
        (lambda anchors: np.zeros_like(anchors), "the anchor of chunk .* is a difference itself"),
    ],
)
def test_an_index_that_leads_nowhere_is_refused(two: tuple[Path, State, State], change: Any, message: str) -> None:
    run, _, _ = two
    url = str(run / "step-2")
    catalog = open_catalog(url)
    assert isinstance(catalog, NativeCatalog)
    tensors = tuple(
        replace(t, grid=replace(t.grid, anchors=None if t.grid.anchors is None else change(t.grid.anchors)))
        for t in catalog.tensors.values()
    )
    hostile = NativeCatalog(open_backend(url), opened=(catalog.record, replace(catalog._contents, tensors=tensors)))
    with pytest.raises(CorruptError, match=message):
        hostile.extents(hostile.tensors["w"], [0])


def test_an_anchor_of_other_bytes_is_noticed(two: tuple[Path, State, State], monkeypatch: pytest.MonkeyPatch) -> None:
    run, _, second = two
    stored = NativeCatalog._stored

    def swapped(self: NativeCatalog, entry: Any, box: Any, file: int) -> Any:
        is_anchor = self.files[file].path.startswith("../") and entry.name == "w"
        return (
            stored(self, entry, box, file)._replace(offset=stored(self, entry, box, file).offset + 64, digest=None)
            if is_anchor
            else stored(self, entry, box, file)
        )

    ckpt.save(run / "step-1", state_of(), reuse=True)  # replaces the index; the files that step-2 needs stay
    ckpt.save(run / "plain", state_of(), reuse=True)
    ckpt.save(run / "step-5", second, codec=XOR, reuse=run / "plain")
    monkeypatch.setattr(NativeCatalog, "_stored", swapped)
    with pytest.raises(CorruptError, match="with its anchor in .* it has the XXH3-128 digest"):
        ckpt.load(run / "step-5", {name: torch.zeros_like(t) for name, t in second.items()})


# ------------------------------------------------------------------------------------------- what stays, copies, rebuilds


def test_an_anchor_stays_until_no_difference_needs_it(two: tuple[Path, State, State]) -> None:
    run, _, second = two
    with pytest.raises(ConflictError, match="step-2"):
        remove_at(str(run / "step-1"))
    ckpt.save(run / "step-1", state_of(3), reuse=True)  # what replaces it leaves the file that is needed
    holds(run / "step-2", second)
    remove_at(str(run / "step-2"))
    remove_at(str(run / "step-1"))
    assert not list(run.rglob("*.safetensors"))


def test_copies_and_conversions_need_no_other_checkpoint(two: tuple[Path, State, State], tmp_path: Path) -> None:
    run, _, second = two
    assert copy_checkpoint(run / "step-2", tmp_path / "copy").committed
    convert(str(run / "step-2"), str(tmp_path / "converted"), to="native")
    shutil.rmtree(run)
    assert features(tmp_path / "copy") == ("codecs", "anchors")
    holds(tmp_path / "copy", second)
    assert copy_checkpoint(tmp_path / "copy", tmp_path / "again").committed
    holds(tmp_path / "again", second)
    assert "anchors" not in features(tmp_path / "converted")
    holds(tmp_path / "converted", second)


def test_rebuild_refuses_what_no_file_says(two: tuple[Path, State, State], tmp_path: Path) -> None:
    run, _, _ = two
    assert not rebuild_checkpoint(str(run / "step-2")).rebuilt
    copy_checkpoint(run / "step-2", tmp_path / "copy")
    for index in (tmp_path / "copy").glob("index-*/*.arrow"):
        index.write_bytes(b"")
    record = (tmp_path / "copy" / "checkpoint.json").read_bytes()
    with pytest.raises(FormatError, match="difference from another checkpoint's chunk"):
        rebuild_checkpoint(str(tmp_path / "copy"))
    assert (tmp_path / "copy" / "checkpoint.json").read_bytes() == record


# -------------------------------------------------------------------------------------------------------------- policy


def test_a_training_loop_makes_every_third_save_an_anchor(run: Path) -> None:
    state, kept = state_of(), {}
    with ckpt.Checkpointer(run, save=EverySteps(1), keep=Latest(2), reuse=Anchor(every=3)) as checkpointer:
        for step in range(1, 6):
            for name, tensor in moved(state).items():
                state[name].copy_(tensor)
            kept[step] = {name: t.clone() for name, t in state.items()}
            checkpointer.save(step, state)
            checkpointer.wait()
            assert (codecs(run / f"step-{step:08d}")["w"] == XOR) == (step not in (1, 4)), step
        assert [s.number for s in checkpointer.steps()] == [4, 5]
    again = {name: torch.zeros_like(t) for name, t in state.items()}
    with ckpt.Checkpointer(run, save=EverySteps(1), keep=Latest(2), reuse=Anchor(every=3)) as checkpointer:
        assert checkpointer.restore(again) == 5
        checkpointer.save(6, again)
        checkpointer.wait()
        checkpointer.save(7, moved(again))
        checkpointer.wait()
    assert [codecs(run / f"step-0000000{n}")["w"] for n in (6, 7)] == ["planes-zstd", XOR]
    holds(run / "step-00000006", kept[5])
    holds(run / "step-00000007", moved(kept[5]))


def test_a_training_loop_goes_on_without_an_anchor_that_is_damaged(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = state_of()
    with ckpt.Checkpointer(run, save=EverySteps(1), reuse=Anchor(every=9)) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        damage(run / "step-00000001", "w")
        checkpointer.save(2, moved(state))
        checkpointer.wait()
    assert "no chunk is stored as its difference from" in caplog.text and "tensor w is damaged" in caplog.text
    assert codecs(run / "step-00000002")["w"] == "planes-zstd"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reuse": 10}, "reuse= is True, False, a TrustFrozen or an Anchor, not 10"),
        ({"reuse": Anchor(), "codec": "zstd"}, "has a codec of its own"),
        ({"codec": XOR}, "needs anchors"),
        ({"reuse": Anchor(), "local": "fast"}, "reuse= does not work with a local tier"),
    ],
)
def test_arguments_that_cannot_be_are_refused(run: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ckpt.Checkpointer(run, **arguments)
    assert not run.exists()


def test_an_anchor_every_so_many_saves_is_a_number() -> None:
    for wrong in (0, -1, True, 2.5):
        with pytest.raises(CkptError, match="every="):
            Anchor(every=wrong)  # type: ignore[arg-type]


def test_the_anchor_that_the_next_save_may_refer_to_stays(tmp_path: Path) -> None:
    """Removals run beside saves: what no difference needs by now may be the base of a save that goes on."""
    frozen = torch.nn.Parameter(torch.ones(3000), requires_grad=False)

    def there(n: int) -> bool:
        return (tmp_path / f"step-{n:08d}/checkpoint.json").exists()

    with ckpt.Checkpointer(tmp_path, save=EverySteps(1), keep=Latest(1), reuse=Anchor(4)) as c:
        for n in range(1, 10):
            c.step(n, {"w": torch.randint(256, (9000,), dtype=torch.uint8), "frozen": frozen})  # no difference of this is smaller
            c.wait()
            end = time.monotonic() + 30
            while n in (7, 8) and there(n - 1) and time.monotonic() < end:
                time.sleep(0.01)
            assert n not in (7, 8) or (there(5) and not there(n - 1))  # what is frozen is in step 1
    record = CommitRecord.from_bytes((tmp_path / "step-00000009/checkpoint.json").read_bytes(), "")
    assert "references" in record.features
