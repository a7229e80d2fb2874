"""The names of the package, what they say about themselves, and that the documents speak of the same ones."""

from __future__ import annotations

import ast
import builtins
import inspect
import json
import operator
import pickle
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt import errors
from ckpt.engine.save.options import SaveArguments
from ckpt.errors import CkptError
from ckpt.needs import PLUGINS

ROOT = Path(__file__).resolve().parents[2]
CALLABLES = [name for name in ckpt.__all__ if callable(getattr(ckpt, name))]
ERRORS = {name: c for name, c in vars(errors).items() if isinstance(c, type) and issubclass(c, CkptError)}


# -------------------------------------------------------------------------------------------------------------- names


def test_there_are_few_names_and_all_exist() -> None:
    assert len(ckpt.__all__) == len(set(ckpt.__all__)) <= 62
    assert all(getattr(ckpt, name) is not None for name in ckpt.__all__)
    assert dir(ckpt) == sorted(ckpt.__all__)


def test_import_of_everything() -> None:
    space: dict[str, Any] = {}
    exec("from ckpt import *", space)
    assert set(space) - {"__builtins__"} == set(ckpt.__all__)
    assert all(space[name] is getattr(ckpt, name) for name in ckpt.__all__)


def test_frozen_values_can_be_keys() -> None:
    for make in (
        lambda: ckpt.Translation(names="llama", convention="huggingface", numbers={"layers": 2}),
        lambda: ckpt.BeginFrom("run", only=["a"], rename={"a": "b"}, sources=["there"]),
        lambda: ckpt.MemberChanges(added=["a"], dropped=["b"], renamed={"c": "d"}),
        lambda: ckpt.RestoredFrom(step=1, url="run", sources={"root": 5}),
        lambda: ckpt.ReadOptions(sources=["there"]),
        lambda: ckpt.MegatronParallel(arguments={"num_layers": 2}),
        lambda: ckpt.Member("a", of=["a", "b"]),
        lambda: ckpt.policies.TrustFrozen(names=["a.*"]),
    ):
        assert {make(): 1}[make()] == 1


def test_names_that_do_not_exist() -> None:
    with pytest.raises(AttributeError, match="'ckpt' has no attribute 'sav'"):
        ckpt.sav  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'DeadlineError'; it is ckpt\.errors\.DeadlineError"):
        ckpt.DeadlineError  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError):
        exec("from ckpt import nothing")


def test_type_checkers_see_the_same_names() -> None:
    """The imports that only they run, and those that happen on first use."""
    tree = ast.parse((ROOT / "ckpt" / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {(a.asname or a.name): node.module for node in block.body if isinstance(node, ast.ImportFrom) for a in node.names}
    seen |= {ast.unparse(node.targets[0]): seen.pop(ast.unparse(node.value)) for node in block.body if isinstance(node, ast.Assign)}
    assert set(seen) == set(ckpt.__all__) - {"__version__"}
    known = {name: module.partition(":")[0] for name, module in ckpt._WHERE.items()}
    assert {name: module for name, module in seen.items() if name not in ckpt.FACES} == known


@pytest.mark.parametrize(
    "code", ["import ckpt", "import ckpt.errors", "from ckpt import errors, CkptError, Layout, Shard, pipeline", "dir(__import__('ckpt'))"]
)
def test_importing_imports_neither_torch_nor_anything_large(code: str) -> None:
    heavy = "{'torch', 'pyarrow', 'fsspec', 'click', 'rich', 'safetensors'}"
    script = f"{code}\nimport sys; sys.exit(', '.join({heavy} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_version_is_that_of_the_writer(url: str) -> None:
    ckpt.save(url, {})
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", ckpt.__version__)
    assert ckpt.__version__ in Path(url, "checkpoint.json").read_text()


# --------------------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("name", [n for n in ckpt.__all__ if n != "__version__"])
def test_every_name_says_what_it_is(name: str) -> None:
    thing = getattr(ckpt, name)
    assert inspect.getdoc(thing), name
    if isinstance(thing, type):
        public = [m for m, member in vars(thing).items() if not m.startswith("_") and callable(member)]
        silent = [m for m in public if not inspect.getdoc(getattr(thing, m))]
        assert thing.__module__.startswith("ckpt.") and not silent


@pytest.mark.parametrize("name", ["save", "load"])
def test_help_names_every_argument_and_error(name: str) -> None:
    function = getattr(ckpt, name)
    text = inspect.getdoc(function) or ""
    for parameter in inspect.signature(function).parameters:
        assert re.search(rf"^\s*(\w+, )*{parameter}[:,]", text.partition("Args:")[2], re.MULTILINE), parameter
    raised = set(re.findall(r"\b\w+Error\b", text.partition("Raises:")[2]))
    assert raised <= set(ERRORS) and len(raised) >= 5


def test_options_are_by_name_only() -> None:
    for function in (ckpt.save, ckpt.load):
        kinds = [p.kind for p in inspect.signature(function).parameters.values()]
        assert kinds[:2] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 2 and set(kinds[2:]) == {inspect.Parameter.KEYWORD_ONLY}


WRONG = {
    "save": {"codec": ["zstd"], "reuse": 3, "job": "dp"},
    "load": {"job": 60, "read": "partial"},
    "save_async": {"staging_bytes": "1 GiB", "reuse": None, "job": "dp"},
    "Checkpointer": {"publish_timeout": "60", "member": 3, "staging_bytes": 2.5, "job": 60},
    "verify": {"threads": -1},
    "copy": {"threads": -1, "dry_run": 1, "compare": "yes"},
    "convert": {"part": 3, "optimizer": "no", "overwrite": 1, "dry_run": 1, "shard_size": "5GB"},
    "merge": {"any_sum": 1, "allow_nan": 1, "values_from": "a", "weights": 3},
    "export": {"overwrite": 1, "dequantize": 1, "layout": 3, "job": "dp", "shard_size": -1, "memory": "1 GiB"},
    "live.reshard": {"strict": 1, "cast": 1, "check_replicas": 1, "new_layout": 3, "job": 60},
    "live.Source": {"layout": 3, "job": 60},
}


@pytest.mark.parametrize(("name", "argument"), [(name, argument) for name, given in WRONG.items() for argument in given])
def test_a_value_of_the_wrong_kind_is_an_error_that_names_the_argument(url: str, name: str, argument: str) -> None:
    state, step = {"w": 1}, f"{url}/a/step-1"
    ckpt.save(step, state)
    given = {"Checkpointer": [f"{url}/a"], "verify": [step], "merge": [f"{url}/m", [step, step]], "live.reshard": [state, dict(state)]}
    of_two = {"copy": [step, f"{url}/b"], "convert": [step, f"{url}/b"], "live.Source": ["tcp://127.0.0.1:0/a", state]}
    options = {"convert": {"to": "torch"}}.get(name, {}) | {argument: WRONG[name][argument]}
    with pytest.raises(errors.UsageError) as caught:
        operator.attrgetter(name)(ckpt)(*(given | of_two).get(name, [step, state]), **options)
    assert argument.removeprefix("new_") in caught.value.message


def test_reports_list_their_fields_in_their_docstrings() -> None:
    for report in (ckpt.LoadReport, ckpt.SaveReport):
        fields = set(report.__dataclass_fields__) - {"url", "id", "tensors", "seconds"}
        assert all(f"``{field}``" in (report.__doc__ or "") for field in fields)


def _python_blocks() -> Iterator[tuple[str, str]]:
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for n, block in enumerate(re.findall(r"^ *```python\n(.*?)```", path.read_text(), re.DOTALL | re.MULTILINE)):
            yield f"{path.name}-{n}", textwrap.dedent(block).replace("…", "...")


@pytest.mark.parametrize("block", [b for _, b in _python_blocks()], ids=[i for i, _ in _python_blocks()])
def test_the_documents_call_what_exists(block: str) -> None:
    """Every name of ckpt in them exists, and every call of one has arguments that it takes."""
    tree = ast.parse(block)
    imported = {a.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "ckpt" for a in node.names}
    assert imported <= set(ckpt.__all__)
    known = set(ckpt.__all__) - {"open"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ckpt":
            assert hasattr(ckpt, node.attr) or (ROOT / "ckpt" / f"{node.attr}.py").exists(), node.attr
        if isinstance(node, ast.Call) and (name := _called(node, known)) is not None:
            keywords = {k.arg: None for k in node.keywords if k.arg}
            signature = inspect.signature(getattr(ckpt, name))
            signature.bind_partial(*node.args, **keywords)
            if name in ("save_async", "Checkpointer"):
                assert keywords.keys() <= {*signature.parameters, *SaveArguments.__annotations__}


def _called(node: ast.Call, known: set[str]) -> str | None:
    function = node.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "ckpt":
        return function.attr if function.attr in ckpt.__all__ else None
    return function.id if isinstance(function, ast.Name) and function.id in known else None


# -------------------------------------------------------------------------------------------------------------- errors


def _drawn() -> dict[str, tuple[str, str | None, str]]:
    """Class → parent, builtin in brackets and exit code, as the tree in the module's docstring draws them."""
    found: dict[str, tuple[str, str | None, str]] = {}
    open_at: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^( {4}[│ ]*(?:[├└]── )?)([A-Z]\w+)(?: \[(\w+)\])?\s+(\d+|--)(?:\s|$)", line)
        if match is None:
            continue
        depth = len(match[1])
        while open_at and open_at[-1][0] >= depth:
            open_at.pop()
        found[match[2]] = (open_at[-1][1] if open_at else "Exception", match[3], match[4])
        open_at.append((depth, match[2]))
    return found


def test_the_drawn_tree_has_every_error() -> None:
    assert set(_drawn()) == set(ERRORS)


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_what_the_tree_says(name: str) -> None:
    parent, builtin, code = _drawn()[name]
    error = ERRORS[name]
    assert error.__bases__[0].__name__ == parent
    if builtin is not None:
        assert issubclass(error, getattr(builtins, builtin))
    else:
        assert error.__bases__[1:] == ()
    if code != "--":
        assert error.exit_code == int(code)
    assert inspect.getdoc(error)


@pytest.mark.parametrize("name", ERRORS)
def test_errors_print_what_where_and_what_to_do(name: str) -> None:
    full = ERRORS[name]("it broke", where="run/step-1", hint="mend it")
    assert str(full) == "it broke (run/step-1)\n  try: mend it"
    assert str(ERRORS[name]("it broke")) == "it broke"
    assert (full.message, full.where, full.hint) == ("it broke", "run/step-1", "mend it")
    copy = pickle.loads(pickle.dumps(full))
    assert type(copy) is ERRORS[name] and str(copy) == str(full)


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_errors_travel_to_another_process(name: str) -> None:
    sent = ERRORS[name]("what", where="where", hint="what to do")
    arrived = errors.error_from_json(json.loads(json.dumps(errors.error_to_json(sent))))
    assert (type(arrived), arrived.message, arrived.where, arrived.hint) == (type(sent), "what", "where", "what to do")


def test_an_error_of_a_peer_makes_no_class_that_is_not_ours() -> None:
    odd = [None, [], {}, {"type": "Mapping"}, {"type": "SystemExit", "message": 3}, {"type": ["a"], "where": {}}, {"type": "error_to_json"}]
    assert [(type(e), e.where) for e in map(errors.error_from_json, odd)] == [(CkptError, None)] * len(odd)
    assert errors.error_from_json(errors.error_to_json(KeyError("x"))).message == "'x'"


def test_an_error_can_be_caught_as_the_builtin(url: str) -> None:
    with pytest.raises(FileNotFoundError):
        ckpt.load(url, {})
    with pytest.raises(TypeError):
        ckpt.save(url, {"x": object()})
    with pytest.raises(ValueError, match="URL"):
        ckpt.open("")
    ckpt.save(url, {"x": 1})
    with pytest.raises(KeyError):
        ckpt.load(url, {})
    with pytest.raises(KeyError):
        ckpt.open(url)["nope"]


# -------------------------------------------------------------------------------------------------------------- faces


WITHOUT_CODE = ("architecture.md", "decisions.md", "benchmarks.md")
"""Pages for people who change the package: they speak of its inside."""
NOT_NAMES = {
    "alert",
    "events",
    "latest",
    "publish",
    "restore",
    "id",
    "rank",
    "shapes",
    "version",
    "digests",
    "digests128",
    "wait",
    "capture",
    "dtypes",
    "sections",
    "x",
}
"""Keys of metadata and metrics that begin with ``ckpt.`` too."""


def _named() -> Iterator[tuple[str, str]]:
    """Page and dotted name of everything of the package that the users' documents name."""
    pages = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if p.name not in WITHOUT_CODE)]
    for page in pages:
        text = page.read_text()
        names = re.findall(r"(?<![\w./-])ckpt((?:\.\w+)+)", " ".join(re.findall(r"`[^`\n]+`|```python\n.*?```", text, re.DOTALL)))
        yield from ((page.name, name[1:]) for name in names)
        for module, listed in re.findall(r"from ckpt((?:\.\w+)*) import ([\w, ]+)", text):
            yield from ((page.name, f"{module}.{name}".strip(".")) for name in re.split(r", *", listed.strip(", ")))


def _is_public(name: str) -> bool:
    first, *rest = name.split(".")
    if first == "integrations":
        place = ROOT / "ckpt" / "integrations"
        return not rest or (place / f"{rest[0]}.py").exists() or (place / rest[0] / "__init__.py").exists()
    if first not in ckpt.FACES:
        return first in ckpt.__all__ or first in NOT_NAMES or f"ckpt.{first}" in PLUGINS
    return not rest or rest[0] == "conformance" or rest[0] in getattr(ckpt, first).__all__


def test_what_the_documents_name_is_public() -> None:
    """Each name is one of ``ckpt`` or of a face, so it can be imported from where the page says."""
    named = set(_named())
    assert len({name for _, name in named}) > 60
    assert sorted((page, name) for page, name in named if not _is_public(name)) == []


def test_a_name_of_the_inside_is_noticed() -> None:
    inner = ("engine.copy.copy_checkpoint", "state.collect.collect", "converters.target.Target")
    assert [name for name in inner if _is_public(name)] == []


@pytest.mark.parametrize("face", ckpt.FACES)
def test_a_face_has_what_it_lists(face: str) -> None:
    module = getattr(ckpt, face)
    assert module.__doc__ and module.__name__ == f"ckpt.{face}"
    for name in getattr(module, "__all__", ()):
        assert getattr(module, name) is not None
    if face != "integrations":
        assert module.__all__
    assert not hasattr(module, "nothing_of_this_name")


def test_functions_are_verbs_and_modules_are_nouns() -> None:
    """No name is both, so ``import ckpt.x`` never hides a function."""
    modules = {path.stem for path in (ROOT / "ckpt").glob("*.py")} | {path.parent.name for path in (ROOT / "ckpt").glob("*/__init__.py")}
    functions = {name for name in ckpt._WHERE if inspect.isfunction(getattr(ckpt, name))}
    assert functions >= {"save", "load", "convert", "export", "copy", "verify"} and not functions & modules
