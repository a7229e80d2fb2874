"""``ckpt gc`` and ``ckpt tag``: nothing goes that is not named before, and never the newest."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt import units
from ckpt.converters.importer import import_checkpoint
from ckpt.engine.verify import verify
from ckpt.formats.native.writer import set_tags
from ckpt.io_backends.faulty import Fault, FaultyProcess, SimulatedCrash
from ckpt.io_backends.registry import open_backend, wrap_backends
from ckpt.runs import step_listing
from tests.cli.running import run


@pytest.fixture
def root(tmp_path: Path) -> str:
    with ckpt.Checkpointer(str(tmp_path / "run")) as c:
        for n in (1, 2, 3, 4):
            c.save(n, {"x": torch.full((10,), float(n))}, metrics={"loss": float("nan") if n == 1 else 1 / n})
            c.wait()
    return str(tmp_path / "run")


def numbers(root: str) -> list[int | None]:
    return [s.number for s in ckpt.list_steps(root) if s.committed]


def test_telling_removes_nothing(root: str) -> None:
    found = run("gc", root, "--keep", "latest=2", "--json")
    assert found.exit_code == 0
    said = json.loads(found.stdout)
    assert [(s["step"], s["outcome"]) for s in said["steps"]] == [(1, "removed"), (2, "removed"), (3, "kept"), (4, "kept")]
    assert not said["acted"] and numbers(root) == [1, 2, 3, 4]
    assert run("gc", root, "--keep", "latest=2", "--dry-run").exit_code == 0 and numbers(root) == [1, 2, 3, 4]
    assert run("gc", root, "--yes", "--dry-run").exit_code == 2
    assert run("gc", root).stdout.count("no --keep was given") == 4


def test_what_is_tagged_and_newest_stays(root: str) -> None:
    assert run("tag", f"{root}/step-00000002", "release").stdout == "release\n"
    assert json.loads(run("ls", root, "--json").stdout)["steps"][1]["tags"] == ["release"]
    assert run("gc", root, "--keep", "latest=1", "--yes").exit_code == 0
    assert numbers(root) == [2, 4]
    assert run("verify", f"{root}/step-00000002").exit_code == 0
    assert run("tag", "-d", f"{root}/step-00000002", "other").exit_code == 2
    assert run("tag", "-d", f"{root}/step-00000002").exit_code == 2
    assert run("tag", "-d", f"{root}/step-00000002", "release").stdout == ""
    assert run("gc", root, "--keep", "latest=1", "--yes").exit_code == 0 and numbers(root) == [4]
    assert run("gc", root, "--keep", "latest=0", "--yes").exit_code == 2 and numbers(root) == [4]


def test_step_0_has_a_reason_too(root: str) -> None:
    ckpt.save(f"{root}/step-00000000", {"x": torch.ones(3)})
    said = json.loads(run("gc", root, "--keep", "latest=1", "--json").stdout)["steps"][0]
    assert (said["step"], said["reasons"]) == (0, ["written last"])


def test_a_metric_that_no_step_has(root: str) -> None:
    for rule in ("best=los:min", "best=acc:max"):
        refused = run("gc", root, "--keep", "latest=1", "--keep", rule, "--yes")
        assert refused.exit_code == 2 and "they have loss" in refused.stderr and numbers(root) == [1, 2, 3, 4]


def test_without_a_rule_everything_stays(root: str) -> None:
    assert run("gc", root, "--yes").exit_code == 0 and numbers(root) == [1, 2, 3, 4]


def test_orphans_go_when_nobody_touched_them_for_long_enough(root: str) -> None:
    for n in (0, 9):
        process = FaultyProcess(Fault(at=6, kind="crash"))
        with wrap_backends(process.wrap), pytest.raises(SimulatedCrash):
            ckpt.save(f"{root}/step-{n:08d}", {"x": torch.ones(10)})
    assert len(ckpt.list_steps(root)) == 6
    assert run("gc", root, "--yes").exit_code == 0
    assert len(ckpt.list_steps(root)) == 6, "saves that may go on"
    said = json.loads(run("gc", root, "--older-than", "0", "--json").stdout)
    assert [(d["url"], d["what"], d["outcome"]) for d in said["orphans"]] == [
        (f"{root}/step-00000000", "save", "removed"),
        (f"{root}/step-00000009", "save", "removed"),
    ]
    assert [s["outcome"] for s in said["steps"]] == ["removed", "kept", "kept", "kept", "kept", "removed"]
    assert len(ckpt.list_steps(root)) == 6
    assert run("gc", root, "--older-than", "0", "-q").stdout == f"{root}/step-00000000\n{root}/step-00000009\n"
    assert run("gc", root, "--older-than", "0", "--yes").exit_code == 0
    assert [s.number for s in ckpt.list_steps(root)] == [1, 2, 3, 4]
    assert sorted(p.name for p in Path(root).glob("step-*")) == [f"step-0000000{n}" for n in (1, 2, 3, 4)]


def test_an_age_that_is_no_time(root: str) -> None:
    for text in ("soon", "1", "1h 30", "", "-1h"):
        assert run("gc", root, "--older-than", text).exit_code == 2
    for text in ("0", "90min", "1d12h", "30s"):
        assert run("gc", root, "--older-than", text).exit_code == 0


def test_killed_in_the_middle_of_removing(root: str) -> None:
    """Whatever is cut off, each checkpoint is whole or does not exist."""
    count = FaultyProcess()
    with wrap_backends(count.wrap):
        run("gc", root, "--keep", "latest=2")
    listing = count.operations
    for n in range(listing, listing + 9):
        with wrap_backends(FaultyProcess(Fault(at=n, kind="crash")).wrap), suppress(SimulatedCrash):
            run("gc", root, "--keep", "latest=1", "--yes")
        for step in ckpt.list_steps(root):
            if step.committed:
                assert run("verify", step.url).exit_code == 0
        assert 4 in numbers(root)


@pytest.mark.parametrize(("name", "scheme"), [("step-00000006", ""), ("imported", ""), ("step-00000006", "file://")])
def test_what_a_virtual_checkpoint_points_into_stays(tmp_path: Path, name: str, scheme: str) -> None:
    root = tmp_path / "run"
    for n in (1, 5):
        ckpt.save(str(root / f"step-{n:08d}"), {"w": torch.full((4,), float(n))})
    import_checkpoint(str(root / "step-00000001"), str(root / name))
    ckpt.save(str(root / "step-00000007"), {"w": torch.full((4,), 7.0)})
    told = run("gc", f"{scheme}{root}", "--keep", "latest=2" if name.startswith("step") else "latest=1", "--yes")
    assert told.exit_code == 0
    assert sorted(p.name for p in root.iterdir()) == sorted(["step-00000001", name, "step-00000007"])
    assert ("used by imported" if name == "imported" else "step 6") in told.stdout
    assert verify(str(root / name)).ok


def size_on_disk(*places: Path) -> int:
    return sum(file.stat().st_size for place in places for file in place.rglob("*") if file.is_file())


def test_the_bytes_and_the_result(root: str) -> None:
    steps = [Path(root) / f"step-0000000{n}" for n in (1, 2, 3, 4)]
    sizes = [size_on_disk(step) for step in steps]
    asked = run("gc", root, "--keep", "latest=2")
    assert asked.stderr == f"2 would be removed, {units.size(sum(sizes[:2]))}; --yes removes them\n"
    assert [re.split(r" {2,}| (?=[KMGi]*B)", line)[:4] for line in asked.stdout.splitlines()[1:]] == [
        [step.name, action, *units.size(size).split()]
        for step, action, size in zip(steps, ("would remove", "would remove", "keep", "keep"), sizes, strict=True)
    ]
    document = json.loads(run("gc", root, "--keep", "latest=3", "--yes", "--json").stdout)
    assert [s["bytes"] for s in document["steps"]] == sizes
    assert (document["removed"], document["removed_bytes"]) == (1, sizes[0])
    done = run("gc", root, "--keep", "latest=1", "--yes")
    assert done.stderr == f"2 removed, {units.size(sum(sizes[1:3]))}; 1 checkpoint kept, {units.size(sizes[3])}\n"
    assert [re.split(" {2,}", line)[1] for line in done.stdout.splitlines()[1:]] == ["remove", "remove", "keep"]
    assert run("gc", root, "--yes").stderr == f"nothing removed; 1 checkpoint kept, {units.size(sizes[3])}\n"
    assert run("gc", root).stderr == "nothing to remove\n"
    assert run("gc", "-q", root, "--yes").output == ""


def test_a_single_checkpoint_is_refused(root: str) -> None:
    for more in ([], ["--yes", "--keep", "latest=1", "--older-than", "0"]):
        refused = run("gc", f"{root}/step-00000002", *more)
        assert refused.exit_code == 2 and "this is a single checkpoint; gc works on the run that contains it" in refused.stderr
        assert f"  try: ckpt gc {root}; or `ckpt rm {root}/step-00000002`" in refused.stderr
    assert numbers(root) == [1, 2, 3, 4]


def test_two_that_tag_at_once_lose_no_tag(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tag keeps a checkpoint from removal, so one that is lost may cost the checkpoint."""
    url = f"{root}/step-00000002"
    list_now = step_listing.list_steps

    def list_and_lose_the_race(root_url: str) -> list[step_listing.Step]:
        steps = list_now(root_url)
        set_tags(open_backend(url), ["theirs"])
        return steps

    monkeypatch.setattr(step_listing, "list_steps", list_and_lose_the_race)
    lost = run("tag", url, "mine")
    assert lost.exit_code == 33 and "tagged meanwhile" in lost.stderr
    monkeypatch.undo()
    assert json.loads(run("tag", "--json", url, "mine").stdout)["tags"] == ["mine", "theirs"]


def test_what_a_run_has_abandoned(root: str) -> None:
    with ckpt.Checkpointer(root) as c:
        c.restore({"x": torch.zeros(10)}, step=2)
        c.save(3, {"x": torch.full((10,), 3.0)})
    listed = json.loads(run("ls", root, "--json").stdout)["steps"]
    assert [(s["step"], s["abandoned"], len(s["branches"])) for s in listed] == [(4, 2, 0), (1, None, 0), (2, None, 0), (3, None, 1)]
    assert run("ls", "-q", root).stdout.splitlines()[-1] == f"{root}/step-00000003"
    assert "abandoned: the run went on from step 2 without it" in " ".join(run("ls", root).stdout.split())
    assert run("tag", f"{root}/step-00000001", "a").exit_code == 0  # the records keep what they went on from
    assert run("cp", f"{root}/step-00000003", f"{root}-copy/step-00000003").exit_code == 0
    assert [len(s.branches) for s in ckpt.list_steps(f"{root}-copy")] == [1]
    assert run("gc", root, "--yes").exit_code == 0 and numbers(root) == [1, 2, 3, 4]
    assert run("gc", root, "--abandoned", "--yes").exit_code == 0 and numbers(root) == [1, 2, 3]
