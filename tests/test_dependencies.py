"""The lower bounds that the package claims are those that the workflow installs, and the workflow runs what is here."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

ROOT = Path(__file__).parent.parent
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
