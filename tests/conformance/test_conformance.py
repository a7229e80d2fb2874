"""ckpt and the second reader of the tests against the conformance set, which neither of them wrote."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from xxhash import xxh3_128_hexdigest

import ckpt
from ckpt.cli.main import cli
from ckpt.engine.verify import verify
from ckpt.errors import CkptError
from ckpt.plan import tree
from ckpt.runs.step_listing import list_steps
from tests.conformance.generate import SOURCES, accepted, refused, typed
from tests.formats.oracle import read

HERE = Path(__file__).parent
JOINT = HERE / "accept" / "joint"
ACCEPT = sorted(p.stem for p in (HERE / "accept").glob("*.json") if p.stem != JOINT.name)
REFUSE = sorted(p.stem for p in (HERE / "refuse").glob("*.json"))

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


class Reference(NamedTuple):
    kind: str
    payload: Any


def as_typed(value: object) -> list[Any]:
    """A decoded value in the form of README.md."""
    if isinstance(value, Reference):
        return typed({value.kind: value.payload})
    if value is None:
        return ["null"]
    if isinstance(value, bool):
        return ["bool", str(value).lower()]
    if isinstance(value, np.ndarray):
        return ["array", value.dtype.name, list(value.shape), value.astype(value.dtype.newbyteorder("<")).tobytes().hex()]
    if isinstance(value, np.generic):
        return ["scalar", value.dtype.name, [], value.tobytes().hex()]
    if isinstance(value, torch.Size):
        return ["size", list(value)]
    if isinstance(value, torch.dtype | torch.device):
        return ["dtype" if isinstance(value, torch.dtype) else "device", str(value).removeprefix("torch.")]
    if isinstance(value, dict):
        pairs = [[as_typed(k), as_typed(v)] for k, v in value.items()]
        plain = all(isinstance(k, str) and not k.startswith("$") for k in value)
        return ["mapping", sorted(pairs) if plain else pairs]
    if isinstance(value, list | tuple | set | frozenset):
        return [type(value).__name__, [as_typed(v) for v in value]]
    if isinstance(value, complex):
        return ["complex", repr(value.real), repr(value.imag)]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, io.BytesIO):
        return ["bytesio", value.getvalue().hex()]
    assert isinstance(value, int | float | str)
    return ["string", value] if isinstance(value, str) else [type(value).__name__, repr(value)]


def unordered(value: Any) -> Any:
    """A typed value whose sets are sorted: Python gives their elements in any order."""
    if not isinstance(value, list):
        return value
    items = [unordered(v) for v in value]
    return [items[0], sorted(items[1], key=json.dumps)] if items and items[0] in ("set", "frozenset") else items


@pytest.fixture(scope="module", autouse=True)
def _sources() -> Iterator[None]:
    shutil.copytree(HERE / "accept" / "virtual-sources", SOURCES, dirs_exist_ok=True)
    yield
    shutil.rmtree(SOURCES, ignore_errors=True)  # another process of the tests may have been faster


def test_the_set_is_complete() -> None:
    assert sorted([*accepted(), "virtual"]) == ACCEPT
    assert sorted(refused()) == REFUSE
    assert sorted(p.name for p in (HERE / "refuse").iterdir() if p.is_dir()) == REFUSE


@pytest.mark.parametrize("case", ACCEPT)
def test_ckpt_accepts(case: str) -> None:
    right = json.loads((HERE / "accept" / f"{case}.json").read_text())
    compare(ckpt.open(str(HERE / "accept" / case)), right)
    assert verify(str(HERE / "accept" / case)).ok


def test_both_readers_accept_the_members_of_a_joint_step() -> None:
    right = json.loads((HERE / "accept" / "joint.json").read_text())
    step, given_up = list_steps(str(JOINT))
    assert (step.number, step.committed, step.metrics, step.tags) == (10, True, {"reward": 0.5}, ("good",))
    assert (step.world_size, list(step.members)) == (sum(about["world_size"] for about in right.values()), list(right))
    assert step.tensor_bytes == sum(t["bytes"] for about in right.values() for t in about["tensors"].values() if t["alias"] is None)
    assert (given_up.number, given_up.committed, given_up.reason) == (11, False, "given up: buffer.1 did not save it")
    for name, about in right.items():
        compare(ckpt.open(step.url, member=name), about)
        compare_with_second(JOINT / step.members[name].path, about)
        assert verify(str(JOINT / step.members[name].path)).ok
    assert CliRunner().invoke(cli, ["verify", step.url]).exit_code == 0


def compare(view: ckpt.View, right: dict[str, Any]) -> None:
    """What ckpt reads, with what is right."""
    catalog = view._catalog
    assert catalog.world_size == right["world_size"]
    assert set(view) == set(right["tensors"])
    for name, about in right["tensors"].items():
        entry = catalog.tensors[name]
        assert (entry.dtype.name, list(entry.shape), entry.alias, entry.rank) == (
            about["dtype"],
            about["shape"],
            about["alias"],
            about["rank"],
        )
        assert (entry.logical and list(entry.logical)) == about["logical"]
        if about["logical"] is None:  # what a view gives of a padded tensor is without padding; below are all bytes
            tensor = view[name][...]
            raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
            assert (len(raw), xxh3_128_hexdigest(raw)) == (about["bytes"], about["xxh3_128"]), name
    assert unordered(as_typed(tree.decode(catalog.state, Reference))) == unordered(right["state"])
    ranks = {str(r): {p: as_typed(tree.decode(n, Reference)) for p, n in nodes.items()} for r, nodes in catalog.ranks.items()}
    assert ranks == right["ranks"]


@pytest.mark.parametrize("case", [case for case in ACCEPT if case != "virtual"])  # which the second reader does not know
def test_the_second_reader_accepts(case: str) -> None:
    compare_with_second(HERE / "accept" / case, json.loads((HERE / "accept" / f"{case}.json").read_text()))


def compare_with_second(directory: Path, right: dict[str, Any]) -> None:
    """What the second reader reads, with what is right."""
    tensors = {name: (dtype, list(shape), xxh3_128_hexdigest(raw)) for name, (dtype, shape, raw) in read(directory).items()}
    assert tensors == {name: (t["dtype"], t["shape"], t["xxh3_128"]) for name, t in right["tensors"].items()}


NOT_READ = ("state-", "ranks-node")
"""Cases of values: the second reader gives them as they stand."""


@pytest.mark.parametrize("case", [c for c in REFUSE if (not c.startswith(NOT_READ) and c != "record-digest-twice") or c == "state-nan"])
def test_the_second_reader_refuses(case: str) -> None:
    with pytest.raises(AssertionError):
        read(HERE / "refuse" / case)


def use(directory: Path) -> None:
    view = ckpt.open(str(directory))
    for tensor in view.tensors():
        tensor.read()
    view.state()
    for rank, nodes in view._catalog.ranks.items():
        for path in nodes:
            view.per_rank(path, rank)


@pytest.mark.parametrize("case", REFUSE)
def test_ckpt_refuses(case: str) -> None:
    with pytest.raises(CkptError):
        use(HERE / "refuse" / case)
    try:
        report = verify(str(HERE / "refuse" / case))
    except CkptError:
        return
    assert not report.ok


def test_what_all_refused_cases_are_made_of_is_accepted(tmp_path: Path) -> None:
    from tests.conformance.generate import _anchored, _base, _coded, _ranks, write

    for name, checkpoint in (
        ("base", _base()),
        ("coded", _coded(lambda raw: raw)),
        ("ranks", _ranks()),
        ("anchored", _anchored()),
    ):
        write(tmp_path / name, checkpoint)
        use(tmp_path / name)
        assert verify(str(tmp_path / name)).ok
