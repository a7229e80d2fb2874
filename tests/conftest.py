"""Settings that hold for every test, and the servers that many of them share. Nothing else here knows about a part of the project."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import hypothesis
import pytest

from tests import older_torch, scheduling
from tests.distributed.ranks import ranks
from tests.older_torch import pytest_runtest_call
from tests.s3.stores import bucket, moto_store, object_store, pytest_terminal_summary, s3_url
from tests.scheduling import pytest_xdist_make_scheduler

# The suite that the package ships fails as readably as the tests beside it.
pytest.register_assert_rewrite("ckpt.io_backends.conformance.reading", "ckpt.io_backends.conformance.writing")

__all__ = [
    "bucket",
    "moto_store",
    "object_store",
    "pytest_runtest_call",
    "pytest_terminal_summary",
    "pytest_xdist_make_scheduler",
    "ranks",
    "s3_url",
]

# Every test process imports the package, and every worker rewrites the asserts of every module. An environment without bytecode, as that
# of many containers, would have each of them compile all of it again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Workers share the cores: a second thread of torch would take them from the others while it waits for work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No test has the account's memory daemon: one that starts a daemon without a folder for it, or a thread that does when its test has ended,
# finds this one, and the session ends it.
NO_DAEMON = Path(tempfile.gettempdir()) / f"ckpt-tests-memory-{os.getpid()}"
os.environ["CKPT_MEMORY_DIR"] = str(NO_DAEMON)

SHM = Path("/dev/shm")


def _takes_files(folder: Path) -> bool:
    """Whether there is room for what all workers have at a time, and programs and direct writes are possible, as on a disk."""
    try:
        if shutil.disk_usage(folder).free < 6 << 30 or _free_memory() < 12 << 30 or os.statvfs(folder).f_flag & os.ST_NOEXEC:
            return False
        os.close(os.open(folder, os.O_TMPFILE | os.O_DIRECT | os.O_RDWR))
    except (AttributeError, OSError, ValueError):
        return False
    return True


def _free_memory() -> int:
    """Bytes: what files in memory take, the processes of the tests lack. A container may have less than its machine."""
    (line,) = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:")]
    free = int(line.split()[1]) << 10
    with suppress(OSError, ValueError):  # no limit is "max"
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free


# On a disk, the tests wait for fsyncs longer than they compute: 118 tests of three files make 6,200. Those in io_backends/ stay there.
if "PYTEST_DEBUG_TEMPROOT" not in os.environ and _takes_files(SHM):
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(SHM)

older_torch.adapt()

# No time limit per example: the machines that run this are shared. Few examples: each run draws others.
hypothesis.settings.register_profile("default", deadline=None, print_blob=True, max_examples=25)
hypothesis.settings.register_profile("thorough", parent=hypothesis.settings.get_profile("default"), max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        scheduling.compile_share(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        _skip(items, "slow", "needs --slow")
    if any(item.get_closest_marker("cuda") for item in items) and not _cuda():
        _skip(items, "cuda", "needs a GPU")
    scheduling.arrange(config, items)


def pytest_sessionfinish() -> None:
    if NO_DAEMON.exists():
        from ckpt.errors import CkptError
        from ckpt.nodes import memory_client

        with suppress(CkptError):  # it may have ended
            memory_client.connect(start=False, folder=NO_DAEMON).stop()
        shutil.rmtree(NO_DAEMON)


def pytest_collection_finish() -> None:
    """Tests and modules stay: no garbage collection needs to look at them again."""
    gc.collect()
    gc.freeze()


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def megatron_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of Megatron-Core in ``tests/fixtures``, unpacked, for tests that only read them."""
    from tests.formats.megatron_files import unpacked

    return unpacked(tmp_path_factory.mktemp("megatron"))


@pytest.fixture(autouse=True)
def _plain_logging() -> None:
    """Commands with ``-q``, and benchmarks, quieten the logger of the package for the rest of a process."""
    logging.getLogger("ckpt").setLevel(logging.NOTSET)


@pytest.fixture(scope="session", autouse=True)
def _no_stale_names() -> Iterator[None]:
    """Network file systems remember for a second which files there are; the tests' storages do not, and many tests remove files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt.formats.native.catalog._STALE", 0.01)
        yield


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the shell that starts pytest has set must not change what is tested."""
    for name in list(os.environ):
        if name.startswith(("CKPT_", "FSSPEC_")) or name in {"NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "COLUMNS", "LINES"}:
            monkeypatch.delenv(name)
    monkeypatch.setenv("CKPT_MEMORY_DIR", str(NO_DAEMON))
    monkeypatch.setenv("COLUMNS", "1000")  # each row of a table is one line
