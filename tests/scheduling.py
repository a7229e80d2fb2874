"""In which order the workers of ``pytest -n`` get the files: first those that take long; then the tests that must not share the machine
with much, two at a time, while one worker goes on with those of one process. In one run nothing is collected or started twice.
"""

from __future__ import annotations

import ast
import compileall
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite

ROOT = Path(__file__).parent.parent
SERVER = ("tests/s3/", "tests/faults/", "tests/io_backends/test_fsspec_s3fs.py", "tests/io_backends/test_requests.py")
"""The tests that need an object store, which takes as long to start as many of them: they go to one worker."""
LONG = (
    "tests/integrations/",
    "tests/distributed/",
    "tests/live/",
    "tests/failures/",
    "tests/matrix/",
    "tests/plan/test_growth.py",
    "tests/test_examples.py",
)
"""Files of few tests that take long, most of the time for ranks that wait. A file that begins last would leave other workers idle."""
LIGHT = ("tests/formats/", "tests/api/", "tests/converters/", "tests/engine/", "tests/io_backends/", "tests/policies/", "tests/cli/")
"""Files of one process, but for a few; they are left for the last."""
STORE = "object store"
ALONE = ", alone"
BESIDE = 2
"""How many tests with the mark ``alone`` run at a time, beside at most one other."""


@cache
def alone() -> set[str]:
    """Files and functions with the mark, by the source: workers tell the scheduler names of tests, and no marks."""
    root, names = ROOT / "tests", set[str]()
    for path in root.rglob("test_*.py"):
        if "mark.alone" in (text := path.read_text()):
            file = path.relative_to(root.parent).as_posix()
            for node in ast.parse(text).body:
                marks = node.decorator_list if isinstance(node, ast.FunctionDef) else [node] if isinstance(node, ast.Assign) else []
                if any("attr='alone'" in ast.dump(mark) for mark in marks):
                    names.add(f"{file}::{node.name}" if isinstance(node, ast.FunctionDef) else file)
    return names


def is_alone(nodeid: str) -> bool:
    return not alone().isdisjoint({nodeid.partition("::")[0], nodeid.partition("[")[0]})


def compile_share(config: pytest.Config) -> None:
    """In a worker of the whole suite: compile some of the modules, as the other workers do others. In a fresh checkout, each would compile
    most of them."""
    if all(Path(arg).resolve() != ROOT / "tests" for arg in config.args):
        return
    number, count = int(config.workerinput["workerid"][2:]), config.workerinput["workercount"]
    folders = ("ckpt", "formats", "io_backends", "converters", "cli", "benchmarks", "tests")
    modules = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    for path in modules[number::count]:
        if not path.match("test_*.py"):
            compileall.compile_file(path, quiet=2)
            continue
        with suppress(SyntaxError, AttributeError):  # pytest reports the one when it collects; another pytest may lack names of its own
            compiled = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
            if not compiled.exists() and rewrite.try_makedirs(compiled.parent):
                known_by, code = rewrite._rewrite_test(path, config)
                rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, known_by, compiled)


def arrange(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a worker."""
    if hasattr(config, "workerinput"):
        unseen = [item.nodeid for item in items if is_alone(item.nodeid) != bool(item.get_closest_marker("alone"))]
        assert not unseen, f"the mark alone is a decorator of a function, or in pytestmark of a module: {unseen}"
        items.sort(key=lambda item: _rank(item.nodeid))


def _rank(nodeid: str) -> int:
    """The store's first: one worker has them all."""
    if is_alone(nodeid):
        return 4
    return 0 if nodeid.startswith(SERVER) else 1 if nodeid.startswith(LONG) else 3 if nodeid.startswith(LIGHT) else 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadfile`` in the order of the items."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False

    class Ordered(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = STORE if nodeid.startswith(SERVER) else nodeid.partition("::")[0]
            return file + ALONE * is_alone(nodeid)

        def _reschedule(self, node: Any) -> None:
            units = list(self.workqueue)
            if (
                node.shutting_down
                or not units
                or not units[-1].endswith(ALONE)
                or not units[0].startswith(LIGHT) | units[0].endswith(ALONE)
            ):
                super()._reschedule(node)
            elif self._pending_of(self.assigned_work[node]) <= 2 and (unit := self._next_unit(node, units)):
                self.workqueue.move_to_end(unit, last=False)
                self._assign_work_unit(node)

        def _next_unit(self, node: Any, units: list[str]) -> str | None:
            """While some with the mark are left, and light ones: for one of three workers. All others end first."""
            has_store = STORE in self.assigned_work[node]
            going = [n for n in self.nodes if not n.shutting_down]
            if len(going) > BESIDE + 1:
                if not has_store:
                    node.shutdown()
                    return None
            elif not any(self._pending_of(self.assigned_work[n]) for n in self.nodes if n not in going):
                elsewhere = not has_store and any(STORE in self.assigned_work[n] for n in going)
                mine = [u for u in units if u.endswith(ALONE) and not (elsewhere and u == STORE + ALONE)]
                if mine and sum(map(self._has_alone, set(going) - {node})) < BESIDE:
                    return STORE + ALONE if has_store and STORE + ALONE in mine else mine[0]
            return None if units[0].endswith(ALONE) else units[0]

        def _has_alone(self, node: Any) -> bool:
            return any(unit.endswith(ALONE) and not all(tests.values()) for unit, tests in self.assigned_work[node].items())

        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            super().mark_test_complete(node, item_index, duration)
            if next(iter(self.workqueue), "").endswith(ALONE):
                for other in self.nodes:
                    self._reschedule(other)

    return Ordered(config, log)
