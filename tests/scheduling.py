"""In which order the workers of ``pytest -n`` get the files: those that take long first, and at the end, two at a time, what must not share
the machine with more. In one run: nothing is collected twice, and no server is started again.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

import pytest

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
STORE = "object store"
ALONE = ", alone"
BESIDE = 2
"""How many tests with the mark ``alone`` run at a time."""


@cache
def alone() -> set[str]:
    """Files and functions with the mark, by the source: workers tell the scheduler names of tests, and no marks."""
    root, names = Path(__file__).parent, set[str]()
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


def arrange(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a worker."""
    if hasattr(config, "workerinput"):
        unseen = [item.nodeid for item in items if is_alone(item.nodeid) != bool(item.get_closest_marker("alone"))]
        assert not unseen, f"the mark alone is a decorator of a function, or in pytestmark of a module: {unseen}"
        items.sort(key=lambda item: (is_alone(item.nodeid), not item.nodeid.startswith(SERVER), not item.nodeid.startswith(LONG)))


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

        def _only_alone_left(self) -> bool:
            return next(iter(self.workqueue), "").endswith(ALONE)

        def _reschedule(self, node: Any) -> None:
            if node.shutting_down or not self._only_alone_left() or self._may_have_alone(node):
                super()._reschedule(node)

        def _may_have_alone(self, node: Any) -> bool:
            """Two workers get them, once the others have ended; one of the two is that with the store."""
            going = [n for n in self.nodes if not n.shutting_down]
            has_store = STORE in self.assigned_work[node]
            if len(going) > BESIDE:
                if not has_store:
                    node.shutdown()
                return False
            if STORE + ALONE in self.workqueue:
                self.workqueue.move_to_end(STORE + ALONE, last=not has_store)
            return not any(self._pending_of(self.assigned_work[n]) for n in self.nodes if n not in going)

        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            super().mark_test_complete(node, item_index, duration)
            if self._only_alone_left():
                for other in self.nodes:
                    self._reschedule(other)

    return Ordered(config, log)
