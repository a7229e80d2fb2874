"""What ``test_many_steps.py`` does in processes that are killed while they change a storage, and what has to be there afterwards.

One warm process, which has imported everything and started no thread, forks for each attempt: so SIGKILL never lands in imports, but
at, or some milliseconds after, the operation on the storage that was chosen for it. All checks run in forks, too.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import ckpt
from ckpt import convert, export
from ckpt.converters.importer import import_checkpoint
from ckpt.engine.copy import copy_checkpoint
from ckpt.engine.verify import verify
from ckpt.errors import ConflictError, FormatError, NotCommittedError, NotFoundError
from ckpt.io_backends.registry import open_backend, wrap_backends
from ckpt.policies import Latest, retention
from ckpt.runs.orphans import find_orphans, remove_orphans
from ckpt.runs.removal import infos, remove_steps
from ckpt.runs.step_listing import list_steps
from tests.failures.states import state, stored

CHANGES = frozenset({"create", "create_shared", "put_if", "delete", "write", "commit", "flush", "abort", "abort_upload"})
COMMITS = ("checkpoint.json", "convert.json", "model.safetensors.index.json")
OLD, NEW, LATER = 1, 2, 3
SHORT, LONG = 0.001, 0.03
"""Seconds from the operation to the kill, at most: within it, or within those after it."""


class Counted:
    """A backend, or what one has made to be written, of which every change is noted; before change number ``at`` a kill is on its way."""

    def __init__(self, inner: Any, log: list[str], at: int, delay: float, path: str = "") -> None:
        self._inner, self._log, self._at, self._delay, self._path = inner, log, at, delay, path

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in CHANGES:
            return found

        def call(*args: Any, **options: Any) -> Any:
            path = args[0] if args and isinstance(args[0], str) else self._path
            self._log.append(f"{name} {path}")
            if len(self._log) == self._at + 1:
                _kill(self._delay)
            made = found(*args, **options)
            return Counted(made, self._log, self._at, self._delay, path) if name in ("create", "create_shared") else made

        return call

    def delete_many(self, paths: Collection[str]) -> None:
        for path in paths:  # so that it is killed between them, too
            self.delete(path)

    def __enter__(self) -> Counted:
        return self

    def __exit__(self, *raised: object) -> None:
        self.abort()


def _kill(delay: float) -> None:
    if delay == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    end = time.perf_counter() + delay

    def wait() -> None:
        while time.perf_counter() < end:
            time.sleep(0)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


@dataclass(frozen=True, kw_only=True)
class Kind:
    """``prepare`` makes what is there before ``act``; ``check`` says in a word what is there after a kill, and sees the same go on then."""

    prepare: Callable[[str], object]
    act: Callable[[str], object]
    check: Callable[[str], str]


def _whole(root: str) -> list[int]:
    """The committed steps, all whole."""
    steps = [s for s in list_steps(root) if s.committed]
    assert not any(s.damaged for s in list_steps(root))
    for s in steps:
        assert verify(s.url).ok, s.url
    return [s.number for s in steps if s.number is not None]


# ---- save


def _saved(root: str) -> str:
    number = stored(f"{root}/run")
    assert number in (OLD, NEW)
    ckpt.save(f"{root}/run", state(LATER))
    left = [e.path for e in open_backend(f"{root}/run").list_prefix() if not e.path.startswith(".publish-")]  # those are for gc
    assert stored(f"{root}/run") == LATER and len(left) <= 7, f"orphans: {left}"
    return "new" if number == NEW else "old"


# ---- a loop, its retention and its publishing


def _loop(root: str, **options: Any) -> None:
    with ckpt.Checkpointer(f"{root}/run", keep=Latest(2), job=ckpt.Job(timeout=10), **options) as c:
        start = c.restore(state(0)) or 0
        for n in range(start + 1, start + 3):
            c.save(n, state(n))
            c.wait()


def _tiered(root: str) -> None:
    _loop(root, local=f"{root}/local")


def _looped(root: str) -> str:
    before = _whole(f"{root}/run")
    assert before[-1] >= 3 and len(before) >= 2, before
    _loop(root)
    assert _whole(f"{root}/run") == [before[-1] + 1, before[-1] + 2]
    assert stored(f"{root}/run/step-{before[-1] + 2:08d}") == before[-1] + 2
    return "old" if before[-1] == 3 else "new"


def _published(root: str) -> str:
    before, near = _whole(f"{root}/run"), _whole(f"{root}/local")
    newest = max(before[-1], near[-1])
    assert before[-1] >= 3 and newest - before[-1] <= 1
    with ckpt.Checkpointer(f"{root}/run", local=f"{root}/local", keep=Latest(2), job=ckpt.Job(timeout=10)) as c:
        assert c.restore(state(0)) == newest
    assert _whole(f"{root}/run")[-1] == newest == _whole(f"{root}/local")[-1]
    return "old" if before[-1] == 3 else "new"


# ---- copies, conversions, imports, exports


def _source(root: str) -> str:
    url = f"{root}/source"
    ckpt.save(url, state(NEW))
    return url


def _model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 50))


def _cp(root: str) -> None:
    copy_checkpoint(f"{root}/source", f"{root}/run/step-1")


def _convert(root: str) -> None:
    convert(f"{root}/source", f"{root}/run/step-1", to="native", shard_size=2000)


def _convert_hf(root: str) -> None:
    convert(f"{root}/source", f"{root}/run/step-1", to="hf", root="model", shard_size=1000)


def _import(root: str) -> None:
    import_checkpoint(f"{root}/source", f"{root}/run/step-1", overwrite=True)


def _export(root: str) -> None:
    export(f"{root}/run/step-1", _model(), shard_size=4000, overwrite=True)


def _there(root: str) -> bool:
    """Whether something can be opened at the destination; then all of it can be read."""
    try:
        view = ckpt.open(f"{root}/run/step-1")
    except (NotFoundError, NotCommittedError, FormatError):  # not CorruptError
        return False
    for tensor in view.tensors():
        tensor.read()
    return True


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _made(act: Callable[[str], object]) -> Callable[[str], str]:
    def check(root: str) -> str:
        there = _there(root)
        try:
            act(root)
        except ConflictError:  # it was killed when all was done: who converts again to where a model is, is refused
            if not there or Path(root, "run/step-1/convert.json").exists():
                raise
        assert _there(root)
        if act is not _export:
            wanted, view = ckpt.open(f"{root}/source"), ckpt.open(f"{root}/run/step-1")
            for name in view:
                assert _bytes(view[name].read()) == _bytes(wanted[name if name in wanted else f"model.{name}"].read()), name
        else:
            view, weights = ckpt.open(f"{root}/run/step-1"), _model().state_dict()
            assert sorted(view) == sorted(weights) and all(torch.equal(view[n].read(), weights[n]) for n in weights)
        return "new" if there else "nothing"

    return check


# ---- gc


def _run_with_orphans(root: str) -> None:
    for n in range(1, 5):
        ckpt.save(f"{root}/run/step-{n}", state(n))
    for n, id in ((2, "z" * 16), (7, "0" * 16)):
        for path in (f"index-{id}/state.json", f"data/{id}-00000.safetensors", f"data/{id}-00001.safetensors"):
            file = Path(root, "run", f"step-{n}", path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"orphan")
    Path(root, "run", "step-7", "index-" + "0" * 16, "notes.txt").write_bytes(b"somebody's")


def _gc(root: str) -> None:
    run = f"{root}/run"
    backend, steps = open_backend(run), list_steps(run)
    orphans = find_orphans(backend, older_than=0, now=backend.now() or time.time())
    verdicts = retention(Latest(2), infos(steps), datetime.now(timezone.utc))
    for number in verdicts.removed:
        remove_steps(run, [s for s in steps if s.number == number], {})
    remove_orphans(backend, orphans)


def _cleared(root: str) -> str:
    steps = _whole(f"{root}/run")
    assert steps[-2:] == [3, 4] and [stored(f"{root}/run/step-{n}") for n in steps] == steps
    _gc(root)
    assert _whole(f"{root}/run") == [3, 4]
    others = [p for n in (1, 2, 7) for p in Path(root, "run", f"step-{n}").rglob("*") if p.is_file()]
    assert [p.name for p in others] == ["notes.txt"], others
    return f"{len(steps)} steps"


KINDS = {
    "save": Kind(prepare=lambda r: ckpt.save(f"{r}/run", state(OLD)), act=lambda r: ckpt.save(f"{r}/run", state(NEW)), check=_saved),
    "save_async": Kind(
        prepare=lambda r: ckpt.save(f"{r}/run", state(OLD)),
        act=lambda r: ckpt.save_async(f"{r}/run", state(NEW)).result(),
        check=_saved,
    ),
    "checkpointer": Kind(prepare=lambda r: [ckpt.save(f"{r}/run/step-{n:08d}", state(n)) for n in (2, 3)], act=_loop, check=_looped),
    "publish": Kind(
        prepare=lambda r: [ckpt.save(f"{r}/{place}/step-{n:08d}", state(n)) for n in (2, 3) for place in ("local", "run")],
        act=_tiered,
        check=_published,
    ),
    "cp": Kind(prepare=_source, act=_cp, check=_made(_cp)),
    "convert to native": Kind(prepare=_source, act=_convert, check=_made(_convert)),
    "convert to hf": Kind(prepare=_source, act=_convert_hf, check=_made(_convert_hf)),
    "import": Kind(prepare=_source, act=_import, check=_made(_import)),
    "export": Kind(prepare=lambda r: None, act=_export, check=_made(_export)),
    "gc": Kind(prepare=_run_with_orphans, act=_gc, check=_cleared),
}


# ---- the warm process


def killed(kind: str, folder: str, kills: int, seed: int) -> dict[str, int]:
    """Kill ``kind`` so many times; how often each outcome was seen, and how many kills were within a commit."""
    chance, this = random.Random(seed), KINDS[kind]
    before, counted = f"{folder}/before", f"{folder}/counted"
    _forked(lambda: this.prepare(_made_directory(before)))
    shutil.copytree(before, counted)
    log: list[str] = json.loads(_forked(lambda: _log_of(this, counted)))
    commits = [i for i, what in enumerate(log) if what.startswith(("put_if", "delete")) and what.endswith(COMMITS)]
    near = sorted({i for at in commits for i in range(max(at - 2, 0), min(at + 4, len(log)))})
    found: dict[str, int] = {"changes": len(log), "kills": 0, "within a commit": 0}
    for number in range(10 * kills):
        if found["kills"] == kills:
            break
        root = f"{folder}/{number}"
        shutil.copytree(before, root)
        at = chance.choice(near if chance.random() < 0.5 and near else range(len(log)))
        delay = chance.choice([0.0, chance.uniform(0, SHORT), chance.uniform(0, LONG)])
        if _killed(this, root, at, delay):
            found["kills"] += 1
            found["within a commit"] += at in near
            outcome = _forked(lambda root=root: this.check(root))  # type: ignore[misc]
            found[outcome] = found.get(outcome, 0) + 1
        shutil.rmtree(root)
    return found


def _made_directory(path: str) -> str:
    os.makedirs(path)
    return path


def _log_of(kind: Kind, root: str) -> str:
    log: list[str] = []
    with wrap_backends(lambda b: Counted(b, log, -1, 0.0)):  # type: ignore[arg-type, return-value]
        kind.act(root)
    return json.dumps(log)


def _killed(kind: Kind, root: str, at: int, delay: float) -> bool:
    """Whether it was killed; it may have ended before."""
    pid = os.fork()
    if pid == 0:
        with wrap_backends(lambda b: Counted(b, log, at, delay)):  # type: ignore[arg-type, return-value]
            log: list[str] = []
            signal.alarm(30)
            kind.act(root)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    ended = os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
    assert ended or os.WTERMSIG(status) == signal.SIGKILL, f"it ended with status {status}"
    return not ended


def _forked(do: Callable[[], object]) -> str:
    """What ``do`` gives in a process of its own."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        code = 0
        try:
            signal.alarm(60)
            said = str(do())
        except BaseException:  # noqa: BLE001  the parent raises it
            code, said = 1, traceback.format_exc()
        with os.fdopen(writes, "w") as pipe:
            pipe.write(said)
        os._exit(code)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        said = pipe.read()
    status = os.waitpid(pid, 0)[1]
    assert status == 0, f"status {status}: {said}"
    return said
