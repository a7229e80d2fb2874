"""The notes of a save's progress: their size and cost, what is done with one that nobody should believe, and that none stays behind."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Barrier, BrokenBarrierError, Thread
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.distributed import HashStore

import ckpt
from ckpt.cli.main import cli
from ckpt.formats.native.runlog import PROGRESS_LIMIT, ProgressFile
from ckpt.io_backends.registry import open_backend
from ckpt.net.group import Group
from ckpt.net.store import group_store
from ckpt.telemetry.progress import CAPTURE, DONE, PHASES, WRITE, PhaseProgress, RankSign, SaveProgress, SlowRank, Standing
from ckpt.telemetry.spans import SaveMeter

ID = "0mws5q30zmyejgar"
SLOW = SlowRank(rank=5, host="b", phase="write", done=1, total=4, quiet=0.0, still=1.0)
NOTE = SaveProgress(
    id=ID,
    began=1e9,
    at=1e9 + 3,
    count=3,
    interval=1.0,
    ranks=8,
    phase="write",
    leader=0,
    host="a",
    phases=(PhaseProgress(phase="write", ranks=8, done=8, total=32),),
    awaited=1,
    slowest=(SLOW,),
)


def watch(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["watch", "--once", *arguments])


def note(run: Path, progress: SaveProgress = NOTE, step: int = 7) -> Path:
    ProgressFile(open_backend(str(run / f"step-{step}")), progress.id).write(progress)
    return run / f"step-{step}" / f"index-{progress.id}" / "progress.json"


def test_a_note_is_shown(tmp_path: Path) -> None:
    note(tmp_path)
    result = watch(str(tmp_path))
    assert result.exit_code == 0
    assert result.stdout == "step-7: write 8 B of 32 B (25 %), 3 B/s; 7 of 8 ranks ready after 3 s; waits for rank 5 (host b, write 25 %)\n"
    assert json.loads(watch(str(tmp_path / "step-7"), "--json").stdout)["progress"]["slowest"][0]["rank"] == 5


def test_an_old_note_says_that_the_leader_hangs(tmp_path: Path) -> None:
    path = note(tmp_path)
    os.utime(path, (time.time() - 60, time.time() - 60))
    result = watch(str(tmp_path))
    assert result.exit_code == 31 and "hangs: no sign of life from rank 0 (host a) for 60 s" in result.stdout
    ckpt.save(str(tmp_path / "step-8"), {"x": torch.zeros(4)})  # that save was killed: it goes on no more
    assert "step-8: committed" in watch(str(tmp_path)).stdout


def test_the_newest_note_is_followed(tmp_path: Path) -> None:
    os.utime(note(tmp_path, step=9), (time.time() - 60, time.time() - 60))  # its job was killed, and began again before that step
    note(tmp_path, replace(NOTE, id="0mws5q40zmyejgar"), step=8)
    result = watch(str(tmp_path))
    assert result.exit_code == 0 and result.stdout.startswith("step-8: write")


@pytest.mark.parametrize("name", ["", "node\udcff", "a\x1b[31mb", "a\xa0b", "h" * 200])
def test_whatever_a_host_is_called(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: name)
    sign = RankSign(count=1, phase=WRITE, done=0, total=1, host=SaveMeter().host)
    assert RankSign.from_bytes(sign.to_bytes()).host == sign.host
    ckpt.save(str(tmp_path / "c"), {"x": torch.zeros(4)})
    (rank,) = json.loads(CliRunner().invoke(cli, ["stats", "--ranks", "--json", str(tmp_path / "c")]).stdout)["ranks"]
    assert (rank["host"] or "") == sign.host


def test_threads_that_sign_at_once_are_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    leader, other = (Group(rank, (0, 1), group_store(store, "signs", rank)).call("save", "somewhere", 20.0) for rank in range(2))
    meeting = Barrier(2)

    def meet(*_: object) -> None:
        with suppress(BrokenBarrierError):
            meeting.wait(0.5)

    def signer(count: int) -> RankSign:
        meet()
        return RankSign(count=count, phase=WRITE, done=1, total=2, host="h")

    monkeypatch.setattr("ckpt.net.call.sign_interval", lambda ranks: meet() or 1.0)
    other.signer, other._sign_at = signer, 0.0
    threads = [Thread(target=other.heartbeat) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert leader.awaited()[1] is not None


def test_a_run_that_has_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert watch(str(tmp_path)).exit_code == 10
    (tmp_path / "notes.txt").write_text("x")
    assert watch(str(tmp_path)).exit_code == 10
    result = CliRunner().invoke(cli, ["watch", str(tmp_path), "--timeout", "0"])
    assert result.exit_code == 10
    monkeypatch.setattr("ckpt.cli.live._LINES", 0.0)  # each look is late enough for another line of a log
    result = CliRunner().invoke(cli, ["watch", str(tmp_path), "--interval", "0.05", "--timeout", "1s"])
    assert result.exit_code == 10
    assert result.stdout.count("waiting for the next") == 1


HOSTILE: dict[str, Any] = {
    "no JSON": b"{",
    "deep": b"[" * 10_000,
    "huge": b" " * (PROGRESS_LIMIT + 1),
    "no object": b"[]",
    "bytes": b"\xff\xfe\x00",
    "other version": {"version": 2},
    "other save": {"id": "0000000000000000"},
    "markup in a phase": {"phase": "<script>alert(1)</script>"},
    "a terminal's sequence in a host": {"host": "\x1b]0;owned\x07"},
    "a newline in a host": {"host": "a\nstep-9: committed"},
    "turned text in a host": {"host": "\u202egnp.exe"},
    "a lone surrogate": {"host": "\ud800"},
    "long host": {"host": "h" * 65},
    "negative": {"awaited": -1},
    "true": {"count": True},
    "float": {"ranks": 1.5},
    "enormous": {"ranks": 10**30},
    "infinite": b'{"version":1,"began":1e999}',
    "not a number": {"at": float("nan")},
    "too large for a float": {"at": 10**400},
    "text for a list": {"phases": "write"},
    "many slow ranks": {"slowest": [NOTE.to_json()["slowest"][0]] * 9},
    "a slow rank that is none": {"slowest": [3]},
    "control characters in a slow host": {"slowest": [{**NOTE.to_json()["slowest"][0], "host": "\x9b31m"}]},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_note_that_nobody_should_believe(what: str, tmp_path: Path) -> None:
    path = note(tmp_path)
    change = HOSTILE[what]
    path.write_bytes(change if isinstance(change, bytes) else json.dumps({**NOTE.to_json(), **change}).encode())
    result = watch(str(tmp_path), "--json")
    assert result.exit_code == 20 and json.loads(result.stdout)["error"]["type"] == "CorruptError"
    assert result.stderr.startswith("error: ") and all(line.isprintable() for line in result.stderr.splitlines())
    assert not any(code in result.output for code in ("\x1b", "\x07", "\x9b", "\u202e"))


def test_markup_in_a_host_is_text(tmp_path: Path) -> None:
    note(tmp_path, SaveProgress.from_json({**NOTE.to_json(), "slowest": [{**NOTE.to_json()["slowest"][0], "host": "<b>[red]x"}]}))
    assert "host <b>[red]x" in watch(str(tmp_path)).stdout


def test_what_a_killed_save_left_goes(tmp_path: Path) -> None:
    path = note(tmp_path)
    found = CliRunner().invoke(cli, ["gc", str(tmp_path), "--older-than", "0", "--yes", "--json"])
    assert found.exit_code == 0 and [d["id"] for d in json.loads(found.stdout)["orphans"]] == [ID]
    assert not path.exists()
    path = note(tmp_path)
    ckpt.save(str(tmp_path / "step-7"), {"x": torch.zeros(4)})  # the next save of the same step
    assert not path.exists()


def test_a_note_beside_a_checkpoint_changes_nothing(tmp_path: Path) -> None:
    url = tmp_path / "step-7"
    ckpt.save(str(url), {"x": torch.arange(4.0)})
    (index,) = url.glob("index-*")
    id = index.name.removeprefix("index-")
    (index / "progress.json").write_text("{")
    loaded = {"x": torch.zeros(4)}
    ckpt.load(str(url), loaded)
    assert loaded["x"].tolist() == [0, 1, 2, 3]
    assert CliRunner().invoke(cli, ["verify", str(url)]).exit_code == 0
    ProgressFile(open_backend(str(url)), id).remove()
    note(tmp_path, SaveProgress.from_json({**NOTE.to_json(), "id": id}))
    assert "committed" in watch(str(url)).stdout


@pytest.mark.parametrize("setting", ["0.3", "off", "auto"])
def test_the_setting(setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpt.engine.save import job as progress
    from ckpt.engine.save import leader
    from ckpt.engine.save import save as saving
    from ckpt.formats.native import paths

    monkeypatch.setenv("CKPT_PROGRESS", setting)
    monkeypatch.setattr(progress, "FIRST_SIGN", 0.05)
    monkeypatch.setattr(progress, "_ARRIVES", 0.0)
    seen: list[int] = []
    commit = leader.write_index

    def slow(*given: Any) -> Any:
        end = time.monotonic() + (0.8 if setting != "0.3" else 30)
        while not (notes := list(tmp_path.rglob(paths.PROGRESS))) and time.monotonic() < end:
            time.sleep(0.05)
        seen.append(len(notes))
        return work(*given)

    def committing(*args: Any, **kwargs: Any) -> Any:
        seen.append(len(list(tmp_path.rglob(paths.PROGRESS))))
        return commit(*args, **kwargs)

    work = saving.write
    monkeypatch.setattr("ckpt.engine.save.save.write", slow)
    monkeypatch.setattr("ckpt.engine.save.leader.write_index", committing)
    ckpt.save(str(tmp_path / "a"), {"x": torch.zeros(4)})
    assert seen == [1 if setting == "0.3" else 0, 0]


# -------------------------------------------------------------------------------------------------------- very many ranks


def standing(ranks: int) -> tuple[Standing, dict[int, bytes]]:
    signs = {}
    for position in range(ranks):
        phase, host = CAPTURE if position % 3 else WRITE, f"node{position // 8:05}"
        signs[position] = RankSign(count=1, phase=phase, done=position, total=ranks, host=host).to_bytes()
    return Standing(tuple(range(ranks)), 0.0), signs


def test_sums_of_signs() -> None:
    seen, signs = standing(30)
    seen.hear(signs, 1.0)
    awaited = set(range(10, 30))
    totals = {p.phase: p for p in seen.totals(awaited, WRITE)}
    writing, copying = [p for p in awaited if p % 3 == 0], [p for p in awaited if p % 3]
    assert totals["write"] == PhaseProgress(phase="write", ranks=len(writing), done=sum(writing), total=30 * len(writing))
    assert totals["capture"] == PhaseProgress(phase="capture", ranks=len(copying), done=sum(copying), total=30 * len(copying))
    assert totals["done"] == PhaseProgress(phase=PHASES[DONE], ranks=10, done=300, total=300)
    seen.hear({position: signs[position] for position in (12, 13)}, 20.0)  # no new ones
    fresh = {p: RankSign(count=2, phase=WRITE, done=p, total=30, host="x").to_bytes() for p in awaited if p not in (12, 13)}
    seen.hear(fresh, 20.0)
    slowest = seen.slowest(awaited, WRITE, 21.0, 1.0)
    assert [(one.rank, one.quiet) for one in slowest[:3]] == [(12, 20.0), (13, 20.0), (10, 1.0)]  # the silent, then those with most to do
    assert [one.still for one in slowest[:3]] == [20.0, 20.0, 1.0 if 10 % 3 else 20.0]


def test_many_ranks_make_no_longer_note_and_cost_little() -> None:
    sizes, cpu = [], 0.0
    for ranks in (16, 16_384):
        seen, signs = standing(ranks)
        began = time.thread_time()
        for now in (1.0, 9.0):
            seen.hear(signs, now)
            awaited = set(signs)
            found = NOTE.to_json() | {
                "phases": [_fields(p) for p in seen.totals(awaited, WRITE)],
                "slowest": [_fields(s) for s in seen.slowest(awaited, WRITE, now, 8.0)],
            }
        cpu = (time.thread_time() - began) / 2
        sizes.append(len(json.dumps(SaveProgress.from_json(found).to_json())))
    assert sizes[1] < sizes[0] + 200 < 4096
    assert cpu < 2  # of 8 s between two notes


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
