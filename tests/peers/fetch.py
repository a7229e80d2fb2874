"""Where the tests of other projects come from. Nothing of them is kept in the repository: they are fetched into ``.peers/``.

PyTorch's are in Debian's source package, which apt fetches and checks; its pip package has none. accelerate's are in its source package,
which pip downloads. Lightning's package has none, that of transformers none of its Trainer: theirs come from the tag of the installed
version with git. ``PEERS_LIGHTNING`` and ``PEERS_TRANSFORMERS`` name a repository or a mirror that git can read, where the network reaches
none.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from tests.distributed.ranks import ROOT

CACHE = ROOT / ".peers"
PYTORCH = "2.6.0+dfsg-7"
SOURCES = "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {archive} trixie main\n"


class UnavailableError(Exception):
    """The tests cannot be had here; the message says why."""


def ran(*command: str, folder: Path | None = None, **environment: str) -> str:
    """Run a command.

    Raises:
        UnavailableError: it is not there, takes more than ten minutes, or fails.
    """
    try:
        done = subprocess.run(
            command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=600, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        raise UnavailableError(f"{' '.join(command)}: {err}") from err
    if done.returncode:
        raise UnavailableError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout


def _debian_archive() -> str:
    """Where this machine's apt has Debian from.

    Raises:
        UnavailableError: it has no Debian.
    """
    archives = ran("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Label: Debian").split()
    if not archives:
        raise UnavailableError("apt has no Debian archive among its sources, or no lists of it: run apt-get update")
    return archives[0]


def pytorch() -> Path:
    """The folder ``test/distributed/checkpoint`` of PyTorch."""
    folder = CACHE / "pytorch"
    archive = folder / f"pytorch_{PYTORCH.rpartition('-')[0]}.orig.tar.xz"
    if not archive.exists():
        apt = folder / "apt"
        (apt / "lists" / "partial").mkdir(parents=True, exist_ok=True)
        (apt / "cache" / "archives" / "partial").mkdir(parents=True, exist_ok=True)
        (apt / "sources.list").write_text(SOURCES.format(archive=_debian_archive()))
        settings = {"Dir::Etc::sourcelist": apt / "sources.list", "Dir::Etc::sourceparts": "-", "Dir::State::lists": apt / "lists"}
        settings |= {"Dir::Cache": apt / "cache"}
        (apt / "apt.conf").write_text("".join(f'{key} "{value}";\n' for key, value in settings.items()))
        configured = str(apt / "apt.conf")
        ran("apt-get", "update", APT_CONFIG=configured)
        ran("apt-get", "source", "--download-only", f"pytorch={PYTORCH}", folder=folder, APT_CONFIG=configured)
    inside = "test/distributed/checkpoint"
    if not (folder / inside).exists():
        with tarfile.open(archive) as tar:
            members = [m for m in tar if m.isfile() and f"/{inside}/" in m.name]
            for member in members:
                member.name = member.name.partition("/")[2]
                tar.extract(member, folder, filter="data")
    return folder / inside


def from_git(name: str, address: str, tags: Sequence[str], paths: Sequence[str]) -> Path:
    """Some folders of a repository at the first of ``tags`` that it has."""
    given = os.environ.get(f"PEERS_{name.upper()}", address)
    folder = CACHE / name
    if not (folder / ".fetched").exists():
        folder.mkdir(parents=True, exist_ok=True)
        problems = []
        for tag in tags:
            try:
                if Path(given).exists():  # may lack what is not asked for, so it is not cloned
                    ran("git", "-C", given, "archive", "-o", str(folder / "tests.tar"), tag, *paths)
                    with tarfile.open(folder / "tests.tar") as tar:
                        tar.extractall(folder, filter="data")
                else:
                    ran("git", "init", "-q", str(folder))
                    ran("git", "fetch", "-q", "--depth", "1", "--filter=blob:none", given, tag, folder=folder, GIT_TERMINAL_PROMPT="0")
                    ran("git", "checkout", "-q", "FETCH_HEAD", "--", *paths, folder=folder)
            except UnavailableError as err:
                problems.append(str(err))
                continue
            (folder / ".fetched").write_text(tag)
            return folder
        raise UnavailableError("; ".join(problems))
    return folder


def lightning() -> Path:
    """A checkout with Lightning's tests."""
    from importlib.metadata import version

    tags = [version("lightning"), "2.6.5", "master"]
    paths = ["tests/tests_pytorch"]
    return from_git("lightning", "https://github.com/Lightning-AI/pytorch-lightning", tags, paths) / "tests"


def transformers() -> Path:
    """A checkout with the tests of transformers' Trainer, which its source package lacks."""
    from importlib.metadata import version

    tags = [f"v{version('transformers')}"]
    return from_git("transformers", "https://github.com/huggingface/transformers", tags, ["tests/trainer"])


def accelerate() -> Path:
    """The folder ``tests`` of accelerate's source package, at the installed version."""
    from importlib.metadata import version

    folder = CACHE / "accelerate"
    inside = folder / f"accelerate-{version('accelerate')}"
    if not (inside / "tests").exists():
        source = f"accelerate=={version('accelerate')}"
        ran(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "accelerate", "--dest", str(folder), source)
        with tarfile.open(folder / f"{inside.name}.tar.gz") as tar:
            tar.extractall(folder, members=[m for m in tar if m.name.startswith(f"{inside.name}/tests/")], filter="data")
    return inside / "tests"


def packages(*names: str) -> Path:
    """A folder with Python packages that the tests of others import and ckpt does not need."""
    folder = CACHE / "site"
    there = {path.name.partition("-")[0].lower() for path in folder.glob("*.dist-info")}
    missing = [name for name in names if name.replace("-", "_").lower() not in there]
    if missing:
        ran(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *missing)
    return folder
