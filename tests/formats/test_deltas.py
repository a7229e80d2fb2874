"""Deltas as files: a chain is the model bit for bit, for us and for a reader of forty lines; what does not belong together is refused."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import ckpt
from ckpt.cli.main import cli
from ckpt.converters import export_plan
from ckpt.converters.importer import import_checkpoint
from ckpt.engine.verify import verify
from ckpt.errors import (
    AccessError,
    CkptError,
    ConflictError,
    CorruptError,
    FormatError,
    MismatchError,
    NotCommittedError,
    NotFoundError,
    UsageError,
)
from ckpt.formats.delta_changes import apply_section, encode_run, find_changes, pack, unpack
from ckpt.formats.delta_manifest import DeltaManifest
from ckpt.formats.registry import open_catalog
from tests.formats.delta_oracle import read_chain

State = dict[str, torch.Tensor]


def model(seed: int = 0) -> State:
    """Dtypes of all sizes, an empty tensor, a scalar, one that does not change."""
    torch.manual_seed(seed)
    return {
        "a.weight": torch.randn(300, 70).bfloat16(),
        "a.bias": torch.randn(70, dtype=torch.float64),
        "cube": torch.randn(33, 3, 5),
        "empty": torch.zeros(0, 4),
        "fixed": torch.randn(20, 20),
        "mask": torch.tensor([True, False, True]),
        "scale": torch.tensor(3.5),
        "small": torch.randn(4096).to(torch.float8_e4m3fn),
    }


def step(state: State, number: int) -> None:
    """Change some elements of one tensor, all of another, one of a third."""
    torch.manual_seed(number)
    flat = state["a.weight"].view(-1)
    places = torch.randperm(len(flat))[: len(flat) // 50]
    flat[places] += 1
    state["a.weight"][7] = number
    state["cube"].mul_(1.5)
    state["a.bias"][number] = -0.0
    state["mask"][number % 3] ^= True
    state["scale"] += 1


@pytest.fixture
def chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[State]]:
    """A full export and three deltas, each in sections of at most a page; what each is of."""
    monkeypatch.setattr(export_plan, "WINDOW", 4096)
    state, versions = model(), []
    for number in range(4):
        if number:
            step(state, number)
        report = ckpt.export(tmp_path / f"s{number}", state, since=tmp_path / f"s{number - 1}" if number else None)
        assert (report.since is None) == (number == 0)
        versions.append({n: t.clone() for n, t in state.items()})
    return tmp_path, versions


def same(found: State, wanted: State) -> bool:
    """Bit for bit."""
    bits = {n: (t.dtype, t.shape, t.reshape(-1).view(torch.uint8).tolist()) for n, t in wanted.items()}
    return bits == {n: (t.dtype, t.shape, t.reshape(-1).view(torch.uint8).tolist()) for n, t in found.items()}


def loaded(url: Path, like: State, verify: Literal["full", "off"] = "full") -> State:
    into = {n: torch.full_like(t.float(), 7).to(t.dtype) for n, t in like.items()}
    ckpt.load(url, into, read=ckpt.ReadOptions(verify=verify))
    return into


def test_every_link_is_the_model_of_its_time(chain: tuple[Path, list[State]]) -> None:
    root, versions = chain
    for number, wanted in enumerate(versions):
        assert same(loaded(root / f"s{number}", wanted), wanted)
        assert same(loaded(root / f"s{number}", wanted, verify="off"), wanted)
        assert same(read_chain(root / f"s{number}"), wanted)
        ckpt.convert(root / f"s{number}", root / f"full{number}", to="hf")
        assert same(load_file(root / f"full{number}" / "model.safetensors"), wanted)
    assert any("a.weight.gaps" in load_file(path) for path in (root / "s3").glob("*.safetensors"))


def test_parts_of_tensors(chain: tuple[Path, list[State]]) -> None:
    """Any range of the file, also one that begins in the middle of an element, has the bytes of the full model."""
    root, versions = chain
    backend = open_catalog(str(root / "s3")).backend
    ckpt.export(root / "whole", versions[3])
    whole = (root / "whole" / "model.safetensors").read_bytes()
    assert backend.read("model.safetensors") == whole
    for offset, length in [(0, 5), (4095, 3), (4097, 1), (4100, 4099), (len(whole) - 3, 3), (len(whole) - 4097, 4096), (9999, 0)]:
        assert backend.read("model.safetensors", offset, length) == whole[offset : offset + length]
        buffer = bytearray(length)
        backend.read_into("model.safetensors", offset, memoryview(buffer))
        assert buffer == whole[offset : offset + length]
    assert torch.equal(ckpt.open(root / "s3")["a.weight"][5:9, 3:40], versions[3]["a.weight"][5:9, 3:40])


def test_an_unchanged_model_takes_a_table_alone(chain: tuple[Path, list[State]]) -> None:
    root, versions = chain
    report = ckpt.export(root / "again", versions[3], since=root / "s3")
    (path,) = (root / "again").glob("*.safetensors")
    assert report.changed == 0 and set(load_file(path)) == {"ckpt.sections"}
    assert same(loaded(root / "again", versions[3]), versions[3])


def test_a_full_export_every_so_often(tmp_path: Path) -> None:
    state = model()
    full = []
    for number in range(7):
        step(state, number)
        report = ckpt.export(tmp_path / f"s{number}", state, since=tmp_path / f"s{number - 1}" if number else None, anchor_every=3)
        full.append(report.since is None)
        assert same(loaded(tmp_path / f"s{number}", state), state)
    assert full == [True, False, False, True, False, False, True]


def test_a_chain_moves_as_a_whole(chain: tuple[Path, list[State]], tmp_path: Path) -> None:
    root, versions = chain
    (root / "moved").mkdir()
    for number in range(4):
        shutil.move(root / f"s{number}", root / "moved")
    assert same(loaded(root / "moved" / "s3", versions[3]), versions[3])


def test_only_what_is_trusted_is_followed(chain: tuple[Path, list[State]], monkeypatch: pytest.MonkeyPatch) -> None:
    root, versions = chain
    assert torch.equal(ckpt.open(root / "s3", sources=[root])["cube"].read(), versions[3]["cube"])
    for sources in ([], [root / "s2"]):
        with pytest.raises(AccessError, match="not among the sources"):
            ckpt.open(root / "s3", sources=sources)
    monkeypatch.setenv("CKPT_SOURCES", "/nowhere")
    with pytest.raises(AccessError, match="not among the sources"):
        ckpt.open(root / "s3")


def test_an_anchor_of_one_file_or_of_shards(tmp_path: Path) -> None:
    state = model()
    ckpt.export(tmp_path / "one.safetensors", state)
    ckpt.export(tmp_path / "shards", state, shard_size=3000)
    step(state, 1)
    for name in ("one.safetensors", "shards"):
        report = ckpt.export(tmp_path / f"after {name.partition('.')[0]}", state, since=tmp_path / name)
        assert report.since is not None and same(loaded(Path(report.url), state), state)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, list(arguments))
    return result.exit_code, result.output


def test_commands_know_it(chain: tuple[Path, list[State]]) -> None:
    root, _ = chain
    code, text = run("inspect", str(root / "s3"))
    assert code == 0 and "ckpt-delta" in text and f"delta 3 after the full export {root}/s0" in text
    code, text = run("ls", str(root))
    assert code == 0 and text.count("ckpt-delta") == 3 and text.count("safetensors") == 1
    code, text = run("verify", str(root / "s3"))
    assert code == 0 and "not checked" not in text
    code, text = run("diff", str(root / "s2"), str(root / "s3"))
    assert "a.weight" in text and "fixed" not in text


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest, and give it the id of what it says now."""
    fields = json.loads(path.read_text())
    change(fields)
    try:
        DeltaManifest.from_bytes(json.dumps(fields).encode(), str(path.parent))
    except CorruptError as err:
        fields["id"] = err.message.rpartition("should be ")[2]
    path.write_text(json.dumps(fields))


def refused(url: Path, message: str, kind: type[CkptError] = CorruptError) -> CkptError:
    """What opening, loading and verifying raise or report."""
    with pytest.raises(kind, match=message) as caught:
        ckpt.load(url, model())
    assert caught.value.hint
    assert kind is FormatError or not verify(str(url)).ok
    return caught.value


def test_links_that_are_missing_or_others(chain: tuple[Path, list[State]]) -> None:
    root, versions = chain
    shutil.copytree(root / "s2", root / "kept")
    shutil.rmtree(root / "s2")
    assert str(root / "s2") in str(refused(root / "s3", "a link of the chain is missing"))
    ckpt.export(root / "s2", versions[3], since=root / "s1")
    refused(root / "s3", "this delta follows version .* but .* is there")
    shutil.rmtree(root / "s2")
    shutil.move(root / "kept", root / "s2")
    assert same(loaded(root / "s3", versions[3]), versions[3])
    ckpt.export(root / "s0", versions[1], overwrite=True)
    refused(root / "s3", "the anchor is not the one that the deltas follow")
    shutil.rmtree(root / "s0")
    refused(root / "s3", "the anchor of the chain is missing")
    with pytest.raises(CorruptError, match="the anchor of the chain is missing"):
        ckpt.export(root / "s4", versions[3], since=root / "s3")
    assert not (root / "s4").exists() or not list((root / "s4").iterdir())


def test_a_chain_that_closes_on_itself(chain: tuple[Path, list[State]]) -> None:
    root, _ = chain
    newest = json.loads((root / "s3" / "ckpt-delta.json").read_text())["id"]
    rewritten(root / "s2" / "ckpt-delta.json", lambda f: f.update(base={"url": "../s3", "id": newest}))
    changed = json.loads((root / "s2" / "ckpt-delta.json").read_text())["id"]
    rewritten(root / "s3" / "ckpt-delta.json", lambda f: f["base"].update(id=changed))
    refused(root / "s3", "the chain closes on itself")
    rewritten(root / "s1" / "ckpt-delta.json", lambda f: f.update(anchor=f["base"] | {"url": "../s1"}, base=f["base"] | {"url": "../s1"}))
    refused(root / "s1", "the chain closes on itself")


def test_manifests_that_say_what_cannot_be(chain: tuple[Path, list[State]]) -> None:
    root, _ = chain
    path = root / "s1" / "ckpt-delta.json"
    before = path.read_text()
    cases: list[tuple[Callable[[dict[str, Any]], None], str]] = [
        (lambda f: f.update(result="0" * 32), "the sections of this delta make"),
        (lambda f: f["files"][0].update(size=f["files"][0]["size"] + 8), "accounts for"),
        (lambda f: f["files"][0].update(head=7), "a head of 7 bytes"),
        (lambda f: f["files"][0].update(digest="0" * 32), "other bytes than its manifest says"),
        (lambda f: f.update(files=[]), "do not tile"),
        (lambda f: f["files"][0].update(path="../s2/x"), "lacks or misspells"),
        (lambda f: f["tensors"].reverse(), "not in the order of names"),
        (lambda f: f["tensors"][0].__setitem__(2, [1 << 61]), "do not tile"),
        (lambda f: f.update(number=2), "not a delta of the same chain|there is no checkpoint|is missing"),
        (lambda f: f.update(number=-1), "lacks or misspells"),
        (lambda f: f["base"].update(url="../../s0"), "lacks or misspells"),
    ]
    for change, message in cases:
        path.write_text(before)
        rewritten(path, change)
        refused(root / "s1", message)
    path.write_text(before.replace('"changed"', '"changed": 1, "x"'))
    refused(root / "s1", "was changed after it was written")
    path.write_text(before.replace('"version": 1', '"version": 9'))
    refused(root / "s1", "a delta of version 9", FormatError)
    path.write_text(before[:100])
    refused(root / "s1", "is not a manifest of a delta")


def test_every_flipped_byte_is_noticed(chain: tuple[Path, list[State]]) -> None:
    """In any file of a link: the model of its time, or an error that names the delta. What is flipped in an anchor is found as well."""
    root, versions = chain
    noticed = 0
    for path in [*(root / "s2").iterdir(), root / "s0" / "model.safetensors"]:
        data = bytearray(path.read_bytes())
        for at in range(3, len(data), len(data) // 40):
            data[at] ^= 4
            path.write_bytes(data)
            try:
                right = same(loaded(root / "s3", versions[3]), versions[3])
            except CkptError as err:
                noticed += 1
                right = "s2" in str(err) or path.parent.name == "s0"
            assert right, f"byte {at} of {path}"
            data[at] ^= 4
        path.write_bytes(data)
    assert noticed > 60
    assert same(loaded(root / "s3", versions[3]), versions[3])


def test_a_file_that_is_gone_or_cut_off(chain: tuple[Path, list[State]]) -> None:
    root, _ = chain
    (path,) = (root / "s2").glob("*.safetensors")
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(CkptError, match="delta-00001"):
        ckpt.load(root / "s3", model())
    path.unlink()
    with pytest.raises(CkptError, match="delta-00001"):
        ckpt.load(root / "s3", model())


def test_what_cannot_be_followed(tmp_path: Path) -> None:
    state = model()
    ckpt.export(tmp_path / "full", state)
    ckpt.save(tmp_path / "saved", state)
    with pytest.raises(NotFoundError):
        ckpt.export(tmp_path / "a", state, since=tmp_path / "nowhere")
    with pytest.raises(FormatError, match="a delta cannot follow this export"):
        ckpt.export(tmp_path / "a", state, since=tmp_path / "saved")
    with pytest.raises(MismatchError, match=r"fixed was float32 \[20, 20\], is bfloat16 \[20, 20\]"):
        ckpt.export(tmp_path / "a", {**state, "fixed": state["fixed"].bfloat16()}, since=tmp_path / "full")
    with pytest.raises(MismatchError, match="more was absent, is float32"):
        ckpt.export(tmp_path / "a", {**state, "more": torch.ones(3)}, since=tmp_path / "full")
    with pytest.raises(UsageError, match="a delta is a directory"):
        ckpt.export(tmp_path / "a.safetensors", state, since=tmp_path / "full")
    with pytest.raises(UsageError, match="a delta replaces nothing"):
        ckpt.export(tmp_path / "a", state, since=tmp_path / "full", overwrite=True)
    with pytest.raises(UsageError, match="anchor_every is a whole number of at least 1, not 0"):
        ckpt.export(tmp_path / "a", state, since=tmp_path / "full", anchor_every=0)
    with pytest.raises(ConflictError):
        ckpt.export(tmp_path / "full", state, since=tmp_path / "full")
    assert not (tmp_path / "a.safetensors").exists() and not list(tmp_path.glob("a/*"))
    ckpt.export(tmp_path / "a", state, since=tmp_path / "full")
    with pytest.raises(UsageError, match="lie in several files"):
        import_checkpoint(tmp_path / "a", tmp_path / "imported")
    for options in ({}, {"overwrite": True}, {"since": tmp_path / "full"}, {"since": tmp_path / "full", "overwrite": True}):
        with pytest.raises(ConflictError, match="a delta is there, and nothing replaces a delta"):
            ckpt.export(tmp_path / "a", state, **options)  # type: ignore[arg-type]


def test_a_delta_that_was_begun_is_none(chain: tuple[Path, list[State]]) -> None:
    """Until the manifest is there and the mark of the export is gone, nothing opens; the next export to the same place goes through."""
    root, versions = chain
    shutil.copytree(root / "s3", root / "s4")
    manifest = (root / "s4" / "ckpt-delta.json").read_bytes()
    (root / "s4" / "ckpt-delta.json").unlink()
    record = {"format": "ckpt-export", "version": 1, "id": "0" * 16, "replaces": False, "files": ["delta-00001-of-00001.safetensors"]}
    (root / "s4" / "convert.json").write_text(json.dumps(record))
    with pytest.raises(NotCommittedError):
        ckpt.load(root / "s4", model())
    ckpt.export(root / "s4", versions[3], since=root / "s2")
    assert same(loaded(root / "s4", versions[3]), versions[3]) and (root / "s4" / "ckpt-delta.json").read_bytes() == manifest


# ---------------------- Changed elements of a run: whatever changed comes back bit for bit, in few bytes, and what does not fit is refused.


def changed(base: np.ndarray, places: np.ndarray, kind: str) -> np.ndarray:
    """A copy of bytes in which these elements have other bits."""
    new = base.copy()
    new.view(kind)[places] ^= 1
    return new


@given(
    itemsize=st.sampled_from([1, 2, 4, 8]),
    length=st.integers(0, 300_000),
    share=st.sampled_from([0.0, 0.00001, 0.0005, 0.01, 0.2, 0.7, 1.0]),
    first=st.integers(0, 300_000),
    seed=st.integers(0, 99),
)
def test_what_changed_comes_back(itemsize: int, length: int, share: float, first: int, seed: int) -> None:
    """Gaps of all widths, and runs of any length; ``first`` leaves a long gap at the beginning."""
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 256, length * itemsize, dtype=np.uint8)
    places = np.flatnonzero((rng.random(length) < share) & (np.arange(length) >= first))
    new = changed(base, places, f"<u{itemsize}")
    indices, values = find_changes(base, new, itemsize)
    assert np.array_equal(indices, places) and np.array_equal(values, new.view(f"<u{itemsize}")[places])
    packed = pack(encode_run(base, new, itemsize))
    assert len(packed) <= new.nbytes + 12 and (len(packed) == 0) == (len(places) == 0)
    apply_section(base.data, unpack(packed, "here"), itemsize, "here")
    assert np.array_equal(base, new)


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 509, 510, 511, 65534, 65535, 65536, 131070, 131071])
def test_gaps_at_the_edges_of_codes(gap: int) -> None:
    base = np.zeros(2 * (gap + 2), dtype=np.uint8)
    new = changed(base, np.array([0, gap + 1]), "<u2")
    apply_section(base.data, unpack(pack(encode_run(base, new, 2)), "here"), 2, "here")
    assert np.array_equal(base, new)


@pytest.mark.parametrize(("share", "most"), [(0.01, 0.05), (0.03, 0.12), (0.0, 0.0)])
def test_size_of_changed_bf16(share: float, most: float) -> None:
    rng = np.random.default_rng(1)
    base = rng.integers(0, 256, 4 << 20, dtype=np.uint8)
    places = rng.choice(2 << 20, int(share * (2 << 20)), replace=False)
    assert len(pack(encode_run(base, changed(base, places, "<u2"), 2))) <= most * base.nbytes


def test_changed_columns_are_not_taken_for_all() -> None:
    """The sample that looks for runs which changed throughout does not fall in with any pattern."""
    for columns in (2, 64, 1000, 1024, 4096):
        base = np.zeros((1 << 21) // columns * columns, dtype=np.uint16)
        new = base.copy()
        new.reshape(-1, columns)[:, 0] = 1
        assert len(pack(encode_run(base.view(np.uint8), new.view(np.uint8), 2))) <= min(3.1 / columns + 0.005, 2) * base.nbytes, columns


def test_bits_count_not_numbers() -> None:
    """Zeros of both signs differ, equal NaNs do not; complex numbers of 16 bytes are compared by halves."""
    base, new = np.array([0.0, np.nan, 1.0]), np.array([-0.0, np.nan, 1.0])
    assert find_changes(base.view(np.uint8), new.view(np.uint8), 8).indices.tolist() == [0]
    wide = np.array([1 + 2j, 3 + 4j])
    assert find_changes(wide.view(np.uint8), np.array([1 + 2j, 3 + 5j]).view(np.uint8), 16).indices.tolist() == [3]


def test_runs_that_cannot_be_compared() -> None:
    run = np.zeros(12, dtype=np.uint8)
    for base, itemsize in ((run[:8], 4), (run, 8), (run, 3)):
        with pytest.raises(UsageError):
            find_changes(base, run, itemsize)


def sparse() -> tuple[np.ndarray, bytes]:
    base = np.zeros(2000, dtype=np.uint8)
    return base, pack(encode_run(base, changed(base, np.array([3, 400, 999]), "<u2"), 2))


def test_damaged_lengths_and_indices_are_refused() -> None:
    """Nothing has changed after a refusal."""
    base, packed = sparse()
    width, codes, values = struct.unpack_from("<BxxxII", packed)
    assert (width, codes, values) == (1, 6, 6)
    body = packed[12:]
    cases = {
        "head cut off": packed[:7],
        "body cut off": packed[:-1],
        "more bytes": packed + b"\0",
        "a width that is none": struct.pack("<BxxxII", 3, 2, 6) + body,
        "fewer values": struct.pack("<BxxxII", 1, 6, 4) + body[:-2],
        "half a value": struct.pack("<BxxxII", 1, 6, 5) + body[:-1],
        "an index beyond the run": packed[:12] + bytes([254] * 6) + packed[18:],
        "ends in a skip": packed[:12] + body[:5] + b"\xff" + packed[18:],
        "dense of another length": struct.pack("<BxxxII", 0, 0, 6) + body[6:],
        "dense with gaps": struct.pack("<BxxxII", 0, 6, 6) + body,
        "huge lengths": struct.pack("<BxxxII", 4, 2**32 - 1, 2**32 - 1) + body,
    }
    for what, data in cases.items():
        with pytest.raises(CorruptError, match="a delta has"):
            apply_section(base.data, unpack(data, "here"), 2, "here")
        assert not base.any(), what


@given(st.binary(max_size=60))
def test_any_bytes_are_applied_or_refused(data: bytes) -> None:
    base = np.zeros(64, dtype=np.uint8)
    try:
        apply_section(base.data, unpack(data, "here"), 2, "here")
    except CorruptError:
        assert not base.any()


@pytest.mark.parametrize(("share", "percent"), [(0.0, 0.0), (0.01, 1.54), (0.03, 4.5), (1.0, 100.0)])
def test_sizes_are_those_of_the_documents(share: float, percent: float) -> None:
    """Weights in bfloat16, of which a share moves by one step of the mantissa, at random places (docs/formats.md)."""
    rng, elements = np.random.default_rng(7), 1 << 21
    base = ((rng.standard_normal(elements, dtype=np.float32) * 0.02).view(np.uint32) >> 16).astype(np.uint16)
    new = base + (rng.random(elements, dtype=np.float32) < share).astype(np.uint16)
    packed = pack(encode_run(base.view(np.uint8), new.view(np.uint8), 2))
    assert 100 * len(packed) / base.nbytes == pytest.approx(percent, abs=0.1)
    apply_section(base.data.cast("B"), unpack(packed, ""), 2, "")
    assert np.array_equal(base, new)
