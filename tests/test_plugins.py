"""Entry points of other distributions: all groups with one toy that is installed, and what is said of one that cannot be used."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import ckpt
from ckpt.cli.main import cli
from ckpt.converters.target import target
from ckpt.errors import FormatError, UsageError
from ckpt.formats.native.codecs import CODECS, check_choice
from ckpt.io_backends import InProcessBackend, open_backend
from ckpt.needs import PLUGINS
from ckpt.plan.layout.mesh import Mesh
from ckpt.plan.layout.placements import split_from_json
from ckpt.plan.layout.tensor_layout import TensorLayout
from ckpt.settings import __version__
from tests.toy_plugins import DEFLATE, TOY, installed, use

STATE = {"w": torch.arange(3000.0) // 7}
USES = {
    "ckpt.storage": lambda: open_backend("toy://a"),
    "ckpt.targets": lambda: target("toy"),
    "ckpt.codecs": lambda: check_choice("deflate"),
    "ckpt.placements": lambda: split_from_json(["BlockCyclic", 0, "x", 3]),
    "ckpt.integrations": lambda: import_module("ckpt.integrations").toy,
}
"""How each is asked for by its name; formats are asked in turn."""


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def test_each_kind_is_used_by_its_name(tmp_path: Path) -> None:
    """A checkpoint goes through all of them."""
    InProcessBackend.reset()
    with installed():
        from ckpt.integrations import toy

        assert toy.use is use
        ckpt.save("toy://a", dict(STATE), codec="deflate")
    with installed():  # nothing of it is known yet: verify has to find the codec
        assert "deflate" not in CODECS
        run("verify", "toy://a")
    with installed():
        (tmp_path / "pointer.txt").write_text("toy://a")
        assert torch.equal(ckpt.open(tmp_path)["w"].read(), STATE["w"])
        run("convert", str(tmp_path), str(tmp_path / "out.pt"), "--to", "toy")
        layout = TensorLayout(Mesh.of({"x": 2}), (split_from_json(["BlockCyclic", 0, "x", 3]),))
        assert TensorLayout.from_json(layout.to_json()) == layout
    assert torch.equal(torch.load(tmp_path / "out.pt")["w"], STATE["w"])
    with pytest.raises(UsageError, match="no storage backend for toy://"):
        ckpt.open("toy://a")


@pytest.mark.parametrize("group", USES)
def test_one_that_cannot_be_used_is_named_when_it_is_asked_for(group: str) -> None:
    ((name, reference),) = TOY[group].items()
    message = "ckpt-toy 1.0 cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"
    with installed({group: {name: "no_such_module:X"}}), pytest.raises(UsageError, match=message):
        USES[group]()
    message = f"{name}' of ckpt-toy 1.0 is for ckpt-toolkit>=99; this is {__version__}"
    requires = ["numpy", "ckpt-toolkit>=99", 'ckpt-toolkit<0; extra == "x"']
    with installed({group: {name: reference}}, requires=requires), pytest.raises(UsageError, match=message):
        USES[group]()
    message = f"several distributions have the .* '{name}': ckpt-other 1.0, ckpt-toy 1.0"
    with installed(), installed({group: {name: reference}}, name="ckpt-other"), pytest.raises(UsageError, match=message):
        USES[group]()
    assert "no_such_module" not in sys.modules


@pytest.mark.parametrize("group", ["ckpt.targets", "ckpt.codecs", "ckpt.placements"])
def test_one_of_another_kind_is_refused(group: str) -> None:
    ((name, _),) = TOY[group].items()
    with (
        installed({group: {name: "tests.toy_plugins:use"}}),
        pytest.raises(UsageError, match=r"of ckpt-toy 1.0 is no \w+: .*use is a function"),
    ):
        USES[group]()


def test_a_codec_of_another_name_is_refused() -> None:
    with (
        installed({"ckpt.codecs": {"other": "tests.toy_plugins:DEFLATE"}}),
        pytest.raises(UsageError, match="'deflate', installed as 'other'"),
    ):
        check_choice("other")
    assert DEFLATE.name not in CODECS and "other" not in CODECS


def test_a_format_that_cannot_be_used_hides_no_other_one(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "a", dict(STATE))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "pointer.txt").write_text(str(tmp_path / "a"))
    with installed(), installed({"ckpt.formats": {"aa": "no_such_module:X"}}, name="ckpt-broken"):
        assert list(ckpt.open(tmp_path / "b")) == ["w"]
        (tmp_path / "b" / "pointer.txt").rename(tmp_path / "b" / "magic")
        with pytest.raises(FormatError, match=r"pointer\); the format 'aa' of ckpt-broken 1.0 cannot be imported.*found magic"):
            ckpt.open(tmp_path / "b")
        assert "a" in run("ls", str(tmp_path))


def test_the_version_names_what_is_installed() -> None:
    assert run("--version") == f"ckpt {__version__}\n"
    with installed(), installed({"ckpt.codecs": {"zstd": "no_such_module:X"}, "ckpt.targets": {"toy": "no_such_module:X"}}, name="ckpt-b"):
        lines = run("--version").splitlines()
    assert lines[1:] == [
        "  ckpt-b 1.0: target toy (not usable: the name is taken), codec zstd (not usable: the name is taken)",
        "  ckpt-toy 1.0: storage backend toy, format pointer, target toy (not usable: the name is taken), codec deflate, "
        "placement BlockCyclic, integration toy",
    ]
    assert len(TOY) == len(PLUGINS)


@pytest.mark.parametrize(("points", "modules"), [({"console_scripts": {"ckpt": "x:y"}}, []), ({}, ["ckpt"])])
def test_another_owner_of_the_name_is_warned_of(points: dict[str, dict[str, str]], modules: list[str]) -> None:
    with installed(points, name="other-tool", modules=modules):
        assert "warning: other-tool has a module or command ckpt, too" in run("--version")


@pytest.mark.parametrize(("library", "tried"), [("accelerate", "1.15"), ("lightning", "2.6")])
def test_another_release_of_a_library_than_was_tried_is_warned_of(
    library: str, tried: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip(library)
    module = f"ckpt.integrations.{library}"
    for release in (installed({}, name=library), nullcontext()):
        monkeypatch.delitem(sys.modules, module, raising=False)
        with release:
            import_module(module)
    assert caplog.messages == [f"ckpt was tried with {library} {tried}; version 1.0 is installed"]
