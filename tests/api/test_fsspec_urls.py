"""The whole of ckpt over a storage that only fsspec knows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.engine.verify import verify
from ckpt.errors import StorageError, UsageError
from ckpt.io_backends import Fault, FaultyProcess, join_url, open_backend, wrap_backends
from ckpt.policies import EverySteps, Latest
from tests.formats.reading import FIXTURES
from tests.io_backends.bucket import Bucket, buckets


@pytest.fixture(params=["objects", "directories"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with buckets():
        yield "testbucket://b/run" if request.param == "objects" else f"local://{tmp_path}/run"


def state_of(number: float) -> dict[str, Any]:
    return {"w": torch.full((300, 70), number), "large": torch.arange(3_000_000) + int(number), "n": number}


def test_save_load_open_verify(root: str) -> None:
    url = f"{root}/step-1"
    ckpt.save(url, state_of(1.0), codec="zstd")
    ckpt.save(url, state_of(2.0))  # in its place
    state = {"w": torch.zeros(300, 70), "large": torch.zeros(3_000_000, dtype=torch.int64), "n": 0.0}
    ckpt.load(url, state)
    assert all(torch.equal(torch.as_tensor(state[k]), torch.as_tensor(v)) for k, v in state_of(2.0).items())
    assert torch.equal(torch.as_tensor(ckpt.open(url)["w"][3:5]), torch.full((2, 70), 2.0))
    assert verify(url).ok


def test_a_training_loop(root: str) -> None:
    with ckpt.Checkpointer(root, save=EverySteps(1), keep=Latest(2)) as c:
        for n in range(1, 5):
            c.step(n, state_of(n))
    assert [s.number for s in ckpt.list_steps(root)] == [3, 4]
    state = state_of(0)
    with ckpt.Checkpointer(root) as c:
        assert c.restore(state) == 4
    assert torch.equal(state["w"], state_of(4)["w"])


def test_a_failed_save_leaves_what_was_there(root: str, caplog: pytest.LogCaptureFixture) -> None:
    """A replacing save that fails before it is published changes nothing; after that it stands, and what fails is told."""
    url = f"{root}/whole"  # of a step, a failed save would be noted in the log of the run by a thread, whose operations count too
    ckpt.save(url, state_of(1.0))
    count = FaultyProcess()
    with wrap_backends(count.wrap):
        ckpt.save(url, state_of(1.0))
    publish = next(at for at, what in enumerate(count.log) if what.startswith("put_if"))
    for at in [*range(0, publish, 3), publish]:
        with wrap_backends(FaultyProcess(Fault(at=at, kind="error")).wrap), pytest.raises(StorageError):
            ckpt.save(url, state_of(2.0))
        assert float(ckpt.open(url)["w"][0, 0]) == 1.0
    assert publish + 4 < count.operations  # older files go
    for at in range(publish + 1, count.operations, 4):
        caplog.clear()
        with wrap_backends(FaultyProcess(Fault(at=at, kind="error")).wrap):
            ckpt.save(url, state_of(float(at)))
        assert float(ckpt.open(url)["w"][0, 0]) == at
        assert "injected fault" in caplog.text
    assert verify(url).ok


def test_a_network_that_is_gone(root: str) -> None:
    if root.startswith("local"):
        pytest.skip("there is no network")
    Bucket.answers["pipe_file"] = ConnectionError("no route to host")
    with pytest.raises(StorageError, match="no route to host"):
        ckpt.save(f"{root}/step-1", state_of(1.0))
    assert ckpt.list_steps(root) == []


# -------------------------------------------- A local path is accepted everywhere a URL is: by every public callable, with the same effect.

LLAMA = FIXTURES / "hf" / "llama"
URLS = {"url", "root", "root_url", "source", "sources", "target", "local", "config", "path", "directory", "log_dir"}
"""Names of parameters that are URLs or paths, where they are text at all."""
NOT_PLACES = {
    ("ckpt.convert", "root"): "a key of the state",
    ("ckpt.export", "root"): "a key of the state",
    ("ckpt.monitors.Event", "url"): "a value that listeners get",
    ("ckpt.monitors.Event", "root"): "a value that listeners get",
    ("ckpt.io_backends.InProcessBackend", "url"): "open_backend gives a backend text",
    ("ckpt.io_backends.PosixBackend", "url"): "open_backend gives a backend text",
}


def public_callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    faces = {"ckpt": ckpt, **{f"ckpt.{name}": import_module(f"ckpt.{name}") for name in ckpt.FACES}}
    faces |= {f"ckpt.integrations.{name}": import_module(f"ckpt.integrations.{name}") for name in ("dcp",)}
    for face, module in faces.items():
        for name in getattr(module, "__all__", ()):
            if callable(thing := getattr(module, name)) and name not in ckpt.FACES:
                yield f"{face}.{name}", thing


def _is_value(thing: Callable[..., Any]) -> bool:
    """A report or another record that the package makes: its fields are text."""
    return inspect.isclass(thing) and (hasattr(thing, "__dataclass_fields__") or hasattr(thing, "_fields"))


CALLABLES = {name: thing for name, thing in public_callables() if not _is_value(thing)}


@pytest.mark.parametrize(
    ("name", "thing"), [(n, t) for n, t in public_callables() if not _is_value(t)], ids=lambda v: v if isinstance(v, str) else ""
)
def test_every_place_may_be_a_path(name: str, thing: Callable[..., Any]) -> None:
    try:
        parameters = inspect.signature(thing).parameters.values()
    except ValueError:  # exceptions have no signature
        return
    for parameter in parameters:
        text = parameter.annotation if isinstance(parameter.annotation, str) else str(parameter.annotation)
        if parameter.name in URLS and "str" in text and (name, parameter.name) not in NOT_PLACES:
            assert "PathLike" in text, f"{name}({parameter.name}: {text}) takes no pathlib.Path"


def test_the_signatures_are_looked_at() -> None:
    known = {name: thing for name, thing in public_callables() if not _is_value(thing)}
    assert {"ckpt.save", "ckpt.convert", "ckpt.Checkpointer", "ckpt.monitors.JsonLines", "ckpt.io_backends.open_backend"} <= known.keys()
    assert (
        sum(
            bool(URLS & set(inspect.signature(known[name]).parameters))
            for name in known
            if name.startswith("ckpt.") and name.count(".") == 1
        )
        >= 10
    )


@pytest.fixture
def step(tmp_path: Path) -> Path:
    ckpt.save(tmp_path / "run" / "step-1", {"model": {"w": torch.arange(6.0)}, "n": 1})
    return tmp_path / "run" / "step-1"


USES: dict[str, Callable[[Path, Path], object]] = {
    "save_async": lambda step, new: ckpt.save_async(new, {"w": torch.ones(2)}).result(),
    "load": lambda step, new: ckpt.load(step, {"model": {"w": torch.zeros(6)}, "n": 0}, read=ckpt.ReadOptions(sources=[step.parent])),
    "open": lambda step, new: ckpt.open(step, sources=step.parent)["model.w"].read(),
    "list_steps": lambda step, new: ckpt.list_steps(step.parent)[0].number,
    "verify": lambda step, new: ckpt.verify(step).ok,
    "copy": lambda step, new: ckpt.copy(step, new).committed,
    "convert": lambda step, new: ckpt.convert(LLAMA, new, to="hf", config=LLAMA / "config.json").finished,
    "export": lambda step, new: ckpt.export(new, {"w": torch.ones(2)}, config=LLAMA),
    "translated": lambda step, new: ckpt.translated(LLAMA, ckpt.Translation(names="llama", convention="megatron")),
    "configure_storage": lambda step, new: ckpt.configure_storage(new, None),
    "open_catalog": lambda step, new: ckpt.formats.open_catalog(step).format,
    "open_backend": lambda step, new: open_backend(step).list_dir(),
    "join_url": lambda step, new: join_url(step, "data"),
}


@pytest.mark.parametrize("use", USES)
def test_a_path_does_what_its_text_does(use: str, step: Path, tmp_path: Path) -> None:
    assert USES[use](step, tmp_path / "new") is not False


def test_a_checkpointer_of_paths(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path / "run", local=tmp_path / "local") as checkpointer:
        checkpointer.save(1, {"w": torch.ones(2)})
        checkpointer.wait()
    assert [s.number for s in ckpt.list_steps(tmp_path / "run")] == [1]
    assert isinstance(checkpointer.root, str)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_takes_paths(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from ckpt.integrations.dcp import CkptReader, CkptWriter

    dcp.save({"w": torch.ones(3)}, storage_writer=CkptWriter(tmp_path / "x"), no_dist=True)
    state = {"w": torch.zeros(3)}
    dcp.load(state, storage_reader=CkptReader(tmp_path / "x"), no_dist=True)
    assert state["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("use", [lambda url: ckpt.save(url, {}), ckpt.open, ckpt.verify, lambda url: ckpt.Checkpointer(url).latest()])
def test_a_path_that_was_a_url_is_refused(use: Callable[[Any], object]) -> None:
    with pytest.raises(UsageError, match="lost a slash"):
        use(Path("s3://bucket/run"))
    with pytest.raises(UsageError, match="a URL is a str"):
        use(7)


SWAPPED: dict[str, Callable[[Any, str], object]] = {
    "save": ckpt.save,
    "save_async": ckpt.save_async,
    "load": ckpt.load,
    "open": lambda state, url: ckpt.open(state),
    "verify": lambda state, url: ckpt.verify(state),
}


@pytest.mark.parametrize("name", SWAPPED)
def test_an_error_of_swapped_arguments_is_short(name: str, tmp_path: Path) -> None:
    """It does not hold the state's text, which may be many megabytes."""
    state = {"w": torch.ones(3), "notes": "x" * 100_000}
    with pytest.raises(UsageError, match="it comes first") as caught:
        SWAPPED[name](state, str(tmp_path / "x"))
    assert "a URL is a str, not dict" in str(caught.value) and len(str(caught.value)) < 300
    assert not (tmp_path / "x").exists()
