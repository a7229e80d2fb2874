"""What is installed is what lies here: a wheel is built, read, unpacked and used far away from the sources."""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

ROOT = Path(__file__).parent.parent
ROOMS = ("cli", "converters", "formats", "io_backends")


def copy_of_the_checkout(folder: Path) -> Path:
    """Built from a copy, so that neither build folders nor egg-info appear in the checkout."""
    copy = folder / "copy"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info"))
    return copy


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out, copy = tmp_path_factory.mktemp("wheel"), copy_of_the_checkout(tmp_path_factory.mktemp("source"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", str(out), str(copy)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (found,) = out.glob("*.whl")
    return found


def expected_names() -> set[str]:
    paths = [path for room in ROOMS for kind in ("*.py", "*.toml") for path in (ROOT / room).rglob(kind)]
    names = {f"ckpt/{path.relative_to(ROOT).as_posix()}" for path in paths}
    own = (path.relative_to(ROOT) for path in (ROOT / "ckpt").rglob("*.py"))
    page = {"ckpt/runs/report/report.css", "ckpt/runs/report/report.js"}
    return names | page | {path.as_posix() for path in own if path.parts[1] not in ROOMS} | {"ckpt/py.typed"}


def test_the_wheel_has_every_module_once_and_no_link(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        infos = archive.infolist()
    names = [info.filename for info in infos]
    assert len(names) == len(set(names))
    assert {name for name in names if ".dist-info/" not in name} == expected_names()
    assert [info.filename for info in infos if stat.S_ISLNK(info.external_attr >> 16)] == []


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(wheel) as archive:
        version = archive.read("ckpt/settings.py").decode().partition('__version__ = "')[2].partition('"')[0]
        folder = f"ckpt_toolkit-{version}.dist-info"
        metadata = archive.read(f"{folder}/METADATA").decode()
        scripts = archive.read(f"{folder}/entry_points.txt").decode()
        licence = archive.read(f"{folder}/licenses/LICENSE").decode()
    assert f"Name: ckpt-toolkit\nVersion: {version}\n" in metadata
    needs = {f"Requires-Dist: {need}".replace("'", '"') for need in project["dependencies"]}
    assert needs <= set(metadata.replace("'", '"').splitlines())
    assert "ckpt = ckpt.cli.start:main" in scripts
    assert "Apache License" in licence


def test_the_description_leads_into_the_repository(wheel: Path) -> None:
    """On a package index relative links are dead."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = archive.read(name).decode()
    head, _, description = metadata.partition("\n\n")
    assert "Description-Content-Type: text/markdown" in head
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", description)
    relative = re.findall(r"\]\((?!\w+:|#)([^)]+)\)", (ROOT / "README.md").read_text())
    assert len(relative) > 10 and all(target.startswith(("https://", "#")) for _, target in links)
    inside = [target.split("#")[0].removeprefix(f"{project}/") for _, target in links if target.startswith(f"{project}/")]
    assert {path.partition("/main/")[2] for path in inside} == {path.split("#")[0] for path in relative}
    assert {target.removeprefix(f"{project}/").partition("/")[0] for image, target in links if image} == {"raw"}


def test_the_metadata_lead_to_the_project(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        lines = archive.read(name).decode().splitlines()
    links = {line.partition(": ")[2].partition(", ")[0] for line in lines if line.startswith("Project-URL: ")}
    assert links == {"Repository", "Documentation", "Changelog", "Issues"}
    assert {f"Classifier: Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)} <= set(lines)


def test_the_source_distribution_has_documentation_and_examples(tmp_path: Path) -> None:
    code = f"import setuptools.build_meta as backend; print(backend.build_sdist({str(tmp_path)!r}))"
    built = subprocess.run([sys.executable, "-c", code], cwd=copy_of_the_checkout(tmp_path), capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = [*((ROOT / room, kind) for room in ROOMS for kind in ("*.py", "*.toml")), (ROOT / "ckpt", "*.py")]
    sources = {path.relative_to(ROOT).as_posix() for folder, kind in folders for path in folder.rglob(kind)}
    pages = {path.relative_to(ROOT).as_posix() for kind in ("*.md", "*.svg") for path in (ROOT / "docs").rglob(kind)}
    examples = {path.relative_to(ROOT).as_posix() for kind in ("*.py", "*.md") for path in (ROOT / "examples").rglob(kind)}
    assert len(sources) > 300 and len(pages) > 30 and len(examples) > 10
    assert (
        sources | pages | examples | {"CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md", "pyproject.toml"}
    ) - names == set()
    assert [name for name in names if name.startswith(("tests", "benchmarks"))] == []  # a part of the suite would be worse than none


def test_another_distribution_with_the_same_modules_is_noticed(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    other = tmp_path / "ckpt-0.2.3.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: ckpt\nVersion: 0.2.3\n")
    (other / "RECORD").write_text("ckpt/__init__.py,,\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import ckpt.cli.main; ckpt.cli.main.cli.main(['--version'])"
    ran = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stdout.startswith("ckpt ")
    assert "UserWarning: ckpt 0.2.3 is installed, too" in ran.stderr  # at import
    assert "warning: ckpt has a module or command ckpt, too" in ran.stderr  # of --version
    assert ran.stderr.count("try: pip uninstall ckpt ckpt-toolkit, then pip install ckpt-toolkit") == 2


def test_the_wheel_works_far_from_the_sources(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    code = (
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "import ckpt, ckpt.formats.native, ckpt.io_backends, ckpt.converters, ckpt.cli.main, ckpt.engine.verify\n"
        "print('\\n'.join(sorted(m.__file__ for n, m in sys.modules.items() if n.partition('.')[0] == 'ckpt')))\n"
        "ckpt.cli.main.cli.main(['--version'])\n"
    )
    # -I leaves out PYTHONPATH and the current directory; an editable install of the checkout comes after our entry of sys.path.
    ran = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    *files, version = ran.stdout.splitlines()
    assert version.startswith("ckpt ")
    assert len(files) > 10
    assert [path for path in files if not path.startswith(f"{target}/ckpt/")] == []
    code = (
        f"import sys; sys.path.insert(0, {str(wheel)!r}); import ckpt; print(ckpt.__file__)"  # from an archive, as applications bundle it
    )
    ran = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ran.stdout.startswith(str(wheel)), ran.stderr


# ----------------------- The lower bounds that the package claims are those that the workflow installs, and the workflow runs what is here.

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())


def lower_bounds() -> dict[str, str]:
    needs = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"]]
    return dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(needs), re.MULTILINE))


def test_the_oldest_versions_are_the_lower_bounds() -> None:
    """The first version that can be had of each bound: 2.4 → 2.4.0, or 2.3 → 2.3.1 where there is no 2.3.0. Newer Pythons, with markers,
    may have a later one."""
    lines = [line for line in (ROOT / "constraints" / "oldest.txt").read_text().splitlines() if line and not line.startswith("#")]
    pinned = dict(line.partition(" ;")[0].split("==") for line in reversed(lines))  # the first line of a name
    bounds = lower_bounds()
    assert pinned.keys() == bounds.keys()
    assert [name for name, bound in bounds.items() if not f"{pinned[name]}.".startswith(f"{bound}.")] == []


def test_the_readme_names_all_but_torch() -> None:
    needs = {re.split("[><;]", need)[0] for need in PROJECT["dependencies"] if "python_version" not in need}
    line = re.search(r"pip install --no-deps \.\npip install (.*)", (ROOT / "README.md").read_text())
    assert line is not None
    assert set(line[1].split()) == needs - {"torch"}


def test_the_workflow_runs_each_python_that_the_package_claims() -> None:
    claimed = {text.rpartition(" ")[2] for text in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", text)}
    assert set(WORKFLOW["jobs"]["python"]["strategy"]["matrix"]["python"]) == claimed
    assert PROJECT["requires-python"] == f">={min(claimed, key=lambda version: int(version[2:]))}"


def test_the_workflow_names_what_is_here() -> None:
    """Targets of the Makefile, files and folders; and each job has an end."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = "\n".join(step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step)
    made = set(re.findall(r"\bmake ([\w-]+)", commands))
    assert {"lint", "site", "coverage"} <= made <= targets
    assert [path for path in re.findall(r"(?:constraints|tests|\.ci)/[\w./-]+", commands) if not (ROOT / path).exists()] == []
    assert [name for name, job in WORKFLOW["jobs"].items() if "timeout-minutes" not in job] == []


def test_the_hooks_of_pre_commit_are_here() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = " ".join(hook["entry"] for hook in repository["hooks"])
    assert [path for path in re.findall(r"(?:docs|tests)/[\w./-]+", entries) if not (ROOT / path).exists()] == []
