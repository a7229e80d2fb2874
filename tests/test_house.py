"""The house rules that no other tool checks: which module may import which, what starts without torch, and no swallowed errors."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from benchmarks import house

ROOT = Path(__file__).parent.parent
ROOMS = ("cli", "converters", "formats", "io_backends")
"""Folders beside ckpt/ that are packages inside it."""

FLOORS = (
    ("concurrency", "text"),
    ("errors",),
    ("settings",),
    ("needs",),
    ("dtypes", "plan.layout", "policies", "runs.events", "telemetry", "units"),
    ("io_backends", "plan.tree"),
    ("catalog",),
    ("plan",),
    ("formats", "net", "state"),
    ("engine", "monitors", "runs.step_listing"),
    ("nodes", "runs.members", "runs.reporter", "training"),
    ("api", "converters", "testing"),
    ("live", "runs"),
    ("cli", "integrations"),
    ("__main__", "__init__"),
)
"""The rooms of the house, from the ground up. A room imports from itself and from the floors below it, and from nothing else."""

PURE = tuple(
    f"ckpt.{name}"
    for name in (
        *("catalog", "concurrency", "dtypes", "errors", "needs", "plan", "policies", "settings", "text", "units"),
        *("telemetry.progress", "telemetry.spans"),
    )
)
"""Values and arithmetic: no I/O. They import each other, numpy and the standard library."""

NARROW = {
    "ckpt.formats": (*PURE, "ckpt.formats", *(f"ckpt.io_backends.{name}" for name in ("checks", "protocol", "registry"))),
    "ckpt.catalog": (*PURE, "ckpt.io_backends.protocol"),  # its type alone: a catalog says from which storage its bytes come
    **dict.fromkeys((f"ckpt.runs.report.{name}" for name in ("content", "history")), ("ckpt",)),
    "ckpt.runs.report": (*PURE, "ckpt.runs.report"),  # what reads is above; all else is arithmetic and text
    **dict.fromkeys((name for name in PURE if name != "ckpt.catalog"), PURE),
}
"""Module prefix → the only prefixes that it may import from, where the floors would allow more. The first that matches counts."""

TORCH_WHEN_ASKED = ("ckpt.plan.tree", "ckpt.monitors")
"""Modules that may import torch inside a function: reading a stored torch.dtype gives one, and torch has TensorBoard's writer."""

WITHOUT_TORCH = (
    *(*PURE, "ckpt.formats", "ckpt.io_backends", "ckpt.cli", "ckpt.engine.copy", "ckpt.engine.digest_reader"),
    *("ckpt.engine.verify", "ckpt.monitors", "ckpt.net.connections", "ckpt.net.wire"),
    *(f"ckpt.nodes.{name}" for name in ("backend", "copies", "file_server", "nodes", "parity")),
    *(f"ckpt.nodes.memory_{name}" for name in ("backend", "client", "connection", "daemon", "remote", "store")),
    *(f"ckpt.live.{name}" for name in ("control", "holdings", "offered", "pieces", "pull", "registry", "relay")),
    *(f"ckpt.live.{name}" for name in ("segment", "server")),
    *(f"ckpt.runs.{name}" for name in ("alerts", "events", "orphans", "removal", "report", "step_listing")),
    *("ckpt.runs.tiers", "ckpt.telemetry.progress", "ckpt.telemetry.spans"),
)
TORCH_AT_START = tuple(f"ckpt.{room}" for room in ("converters", "integrations", "live", "testing", "training"))
"""Rooms whose modules may import torch when they are imported. All others do so inside a function, or through ``state/lazy``: a process
without torch saves and loads values."""
CONVERTERS = (
    *("mapping", "selected_state", "selection", "element_differences", "semantic", "comparison", "references", "importer"),
    *("target", "buffered", "file_stream", "conversion", "targets"),
    *("transaction", "export_plan", "delivery", "delta", "live_export", "convert", "merge", "lora"),
)
"""The modules and rooms of converters/, from the ground up: each imports from itself and from those before it."""

WIDEST = 21
"""Files of one folder at most."""
LOOSE = 12
"""Files beside the rooms at most."""
MOST = {"lines": 90_000, "files": 320, "functions over 60 lines": 6, "class names used twice": 0}
"""Of the five packages together; docs/decisions.md says why no fewer. A feature brings its lines from somewhere."""


@dataclass(frozen=True)
class Import:
    """One import statement's target; ``at_start`` if importing the module runs it."""

    module: str
    target: str
    line: int
    at_start: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


@cache
def sources() -> dict[str, Path]:
    """Module name → file, of everything that is installed. Packages are called ``x.__init__``."""
    found = {f"ckpt.{'.'.join(p.relative_to(ROOT).with_suffix('').parts)}": p for room in ROOMS for p in (ROOT / room).rglob("*.py")}
    for path in (ROOT / "ckpt").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[1] not in ROOMS:
            found[".".join(parts)] = path
    return found


@cache
def trees() -> dict[str, ast.Module]:
    """Module name → what it says, read once for all tests."""
    return {module: ast.parse(path.read_text()) for module, path in sources().items()}


@cache
def imports() -> list[Import]:
    return [found for module, tree in trees().items() for found in _imports(module, tree)]


def _imports(module: str, tree: ast.Module) -> Iterator[Import]:
    def walk(node: ast.AST, at_start: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield from (Import(module, target, child.lineno, at_start) for target in _targets(module, child))
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from (i for statement in child.body for i in walk(ast.Module([statement], []), False))
                yield from (i for statement in child.orelse for i in walk(ast.Module([statement], []), at_start))
            else:
                yield from walk(child, at_start and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    return walk(tree, True)


def _targets(module: str, node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = ".".join(module.split(".")[: -node.level]) if node.level else ""
    base = ".".join(part for part in (base, node.module) if part)
    return [f"{base}.{alias.name}" if _is_module(f"{base}.{alias.name}") else base for alias in node.names]


def _is_module(name: str) -> bool:
    return name in sources() or f"{name}.__init__" in sources()


def _below(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


# -------------------------------------------------------------------------------------------------------------- arrows


def test_the_readers_see_imports() -> None:
    tree = ast.parse("import torch\nif TYPE_CHECKING:\n    import a\nelse:\n    import b\ndef f():\n    from ...x import y\n")
    found = {(i.target, i.at_start) for i in _imports("ckpt.engine.load.reader", tree)}
    assert found == {("torch", True), ("a", False), ("b", True), ("ckpt.x", False)}
    assert {"ckpt.cli.main", "ckpt.plan.layout.geometry", "ckpt.engine.__init__"} <= sources().keys()


def _room(module: str) -> tuple[int, str]:
    """The floor of a module, counted from the ground, and its room."""
    rest = module.partition(".")[2] or "__init__"
    return next((n, room) for n, floor in enumerate(FLOORS) for room in floor if _below(rest, (room,)))


def test_every_module_has_a_room() -> None:
    for module in sources():
        if module != "ckpt.engine.__init__":
            _room(module)


def test_imports_point_down() -> None:
    wrong = []
    for statement in imports():
        if statement.target.partition(".")[0] == "ckpt" and statement.module != "ckpt.engine.__init__":
            (own, room), (floor, target) = _room(statement.module), _room(statement.target)
            narrow = next((to for prefix, to in NARROW.items() if _below(statement.module, (prefix,))), ("ckpt",))
            if (room != target and floor >= own) or not _below(statement.target, narrow):
                wrong.append(str(statement))
    assert wrong == []


def test_trainers_are_imported_by_their_integrations_alone() -> None:
    found = [i for i in imports() if f"{i.target}.".startswith("ckpt.integrations.")]
    assert [str(i) for i in found if not i.module.startswith("ckpt.integrations.")] == ["ckpt.__init__:23 imports ckpt.integrations"]
    foreign = {i.module for i in imports() if i.target.partition(".")[0] in ("transformers", "lightning", "torchtitan")}
    assert foreign == {f"ckpt.integrations.{name}" for name in ("transformers", "lightning", "torchtitan")}


def test_the_modules_of_converters_are_stacked() -> None:
    rooms = {m.split(".")[2] for m in sources() if _below(m, ("ckpt.converters",))}
    assert rooms == {"__init__", *CONVERTERS}
    inner = [i for i in imports() if all(name.startswith("ckpt.converters.") for name in (i.module, i.target))]
    order = {room: n for n, room in enumerate((*CONVERTERS, "__init__"))}  # its public names
    upward = [str(i) for i in inner if order[i.target.split(".")[2]] > order[i.module.split(".")[2]]]
    assert inner and upward == []


def test_no_room_is_too_full() -> None:
    folders = Counter(path.parent for path in sources().values())
    assert {str(folder.relative_to(ROOT)): n for folder, n in folders.items() if n > WIDEST} == {}
    assert folders[ROOT / "ckpt"] <= LOOSE


def test_the_house_does_not_grow() -> None:
    figures = house.figures(house.sources(ROOT), ROOT)
    assert {name: figures[name] for name, most in MOST.items() if int(figures[name]) > most} == {}
    assert sum(path.read_text().count("\n") for path in (ROOT / "benchmarks").glob("*.py")) <= 5_000


def test_the_rooms_are_imported_through_ckpt() -> None:
    assert [str(found) for found in imports() if found.target.partition(".")[0] in ROOMS] == []


def test_torch_stays_out_of_what_must_run_without_it() -> None:
    bound = [f for f in imports() if _below(f.module, WITHOUT_TORCH) and (f.at_start or not _below(f.module, TORCH_WHEN_ASKED))]
    assert [str(f) for f in bound if f.target.partition(".")[0] == "torch"] == []


def test_no_import_circle() -> None:
    """Nor one through imports inside functions, or those that only type checkers run."""
    edges: dict[str, set[str]] = {}
    for found in imports():
        target = found.target if found.target in sources() else f"{found.target}.__init__"
        if target in sources() and target != found.module:
            edges.setdefault(found.module, set()).add(target)
    assert _circle(edges) is None


def _circle(edges: dict[str, set[str]]) -> list[str] | None:
    """A path that ends where it began, or None."""
    finished: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str] | None:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in finished:
            return None
        circles = (walk(target, [*path, module]) for target in sorted(edges.get(module, ())))
        found = next((circle for circle in circles if circle), None)
        finished.add(module)
        return found

    return next((circle for module in sorted(edges) if (circle := walk(module, []))), None)


def test_a_circle_is_found() -> None:
    assert _circle({"a": {"b"}, "b": {"c", "d"}, "d": {"b"}}) == ["b", "d", "b"]
    assert _circle({"a": {"b", "c"}, "b": {"c"}}) is None


# --------------------------------------------------------------------------------------------------------------- files


def _swallows(handler: ast.ExceptHandler) -> bool:
    names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)} if handler.type else {"BaseException"}
    return bool(names & {"Exception", "BaseException"}) and not any(isinstance(node, ast.Raise) for node in ast.walk(handler))


def test_no_error_is_swallowed_without_a_reason() -> None:
    texts = {module: path.read_text() for module, path in sources().items()}
    handlers = ((m, node) for m, tree in trees().items() for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler))
    lines = ((m, h.lineno, texts[m].splitlines()[h.lineno - 1].strip()) for m, h in handlers if _swallows(h))
    assert [line for line in lines if "#" not in line[2]] == []


def test_json_is_parsed_in_one_place() -> None:
    """``json.loads`` raises more than ValueError, and who calls it forgets that."""
    parsers = {"load", "loads", "JSONDecoder"}
    nodes = [(module, node) for module, tree in trees().items() for node in ast.walk(tree)]
    attributes = ((module, node.attr, node.value) for module, node in nodes if isinstance(node, ast.Attribute))
    calls = {module for module, name, of in attributes if name in parsers and isinstance(of, ast.Name) and of.id == "json"}
    names = {module for module, node in nodes if isinstance(node, ast.ImportFrom) and node.module == "json"}
    assert (calls, names) == ({"ckpt.text"}, set())


def test_every_module_says_what_it_is_for() -> None:
    assert [module for module, tree in trees().items() if not ast.get_docstring(tree)] == []


def test_a_class_name_is_used_once() -> None:
    names = Counter(node.name for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} == set()


def test_no_drawer_for_odds_and_ends() -> None:
    names = {part for module in sources() for part in module.split(".")}
    assert not names & {"utils", "util", "helpers", "common", "misc"}


@pytest.mark.parametrize("room", ROOMS)
def test_the_links_lead_to_the_rooms(room: str) -> None:
    assert (ROOT / "ckpt" / room).readlink() == Path("..") / room


# --------------------------------------------------------------------------------------------------------------- start


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def _loaded(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after ``code``."""
    printed = _run(f"{code}\nimport sys; print('MODULES', *{{m.partition('.')[0] for m in sys.modules}})")
    return set(printed.partition("MODULES ")[2].split())


HELP = "import sys; from ckpt.cli.main import cli; sys.exit = lambda code: None; cli.main(['--help'])"


def test_pure_modules_load_neither_torch_nor_pyarrow() -> None:
    modules = [m.removesuffix(".__init__") for m in sources() if _below(m, PURE)]
    assert not _loaded(f"import {', '.join(modules)}") & {"torch", "pyarrow", "fsspec"}


def test_torch_is_loaded_when_a_tensor_is_met() -> None:
    free = [m for m in sources() if _below(m, WITHOUT_TORCH) or not _below(m, TORCH_AT_START)]
    modules = [m.removesuffix(".__init__") for m in free if not m.endswith(("conformance", "__main__"))]
    assert len(modules) > 240 and "torch" not in _loaded(f"import {', '.join(modules)}")


def test_help_loads_nothing_heavy() -> None:
    loaded = _loaded(HELP)
    assert "click" in loaded
    assert not loaded & {"torch", "numpy", "pyarrow", "fsspec", "rich", "zstandard", "xxhash"}


FIRST = """
import sys
tried = set()
class Tried:  # also what is not installed here
    @staticmethod
    def find_spec(name, path=None, target=None):
        tried.add(name)
sys.meta_path.insert(0, Tried)
import ckpt
ckpt.save_async("inprocess://first", {"queue": [1]}).result()
ckpt.load("inprocess://first", {"queue": []})
early = {"torch"} & set(sys.modules)
import torch
state = {"model": torch.nn.Linear(2, 2), "plain": {"a": torch.ones(3)}}
for _ in range(2):
    ckpt.save("inprocess://first", state)
    ckpt.load("inprocess://first", state)
ckpt.save_async("inprocess://first", state).result()
with ckpt.Checkpointer("inprocess://run") as c:
    c.step(1, state)
heavy = {"ckpt.testing.witness", "torch.distributed.tensor", "torch._dynamo", "sympy", "fsspec", "pandas", "numpy.ma"}
heavy |= {"pyarrow.compute", "pyarrow.dataset"}
print("HEAVY", *early, *heavy & (set(sys.modules) | tried))

import torch.distributed as dist
from ckpt.state.torch_objects import scan_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
state["later"] = distribute_tensor(torch.arange(6.0), init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), [Shard(0)])
ckpt.save("inprocess://later", state)
print("LATER", ckpt.open("inprocess://later")["later"].read().tolist(), *scan_state(state).meshes)
"""


def test_a_first_save_and_load_import_no_more_than_they_need() -> None:
    """No torch for values, and no DTensor where nothing else has imported it; what comes later is known for what it is."""
    heavy, later = (line.split(maxsplit=1)[1:] for line in _run(FIRST).splitlines() if line.startswith(("HEAVY", "LATER")))
    assert heavy == []
    assert later[0].startswith("[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]") and "dp" in later[0]


def _cpu_seconds(code: str) -> float:
    """CPU time of a fresh interpreter that runs ``code``: the least of five, because other load only adds."""
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        _run(code)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def test_help_starts_in_a_blink() -> None:
    bare, with_help = _cpu_seconds("pass"), _cpu_seconds(HELP)
    print(f"python: {1000 * bare:.0f} ms, ckpt --help: {1000 * with_help:.0f} ms of CPU time")
    assert with_help < 15 * bare


# ----------------------------------------- The script that counts the sources counts right; test_house.py has the limits of what it counts.

LONG = "def long():\n" + "    pass\n" * 70


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    files = {
        "ckpt/__init__.py": "from . import a, b\n",
        "ckpt/a.py": "# why\nfrom . import b\ndef _once(found): pass\ndef f(): return _once(1)\n",
        "ckpt/b.py": "if TYPE_CHECKING:\n    from .a import f\nclass Twice: ...\nassert f is not None\n",
        "cli/__init__.py": "",
        "cli/run.py": f"class Twice: ...\n{LONG}def many({', '.join(f'p{n}' for n in range(13))}): ...\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for folder in house.BESIDE[1:]:
        (tmp_path / folder).mkdir()
    (tmp_path / "ckpt" / "cli").symlink_to("../cli")
    return tmp_path


def test_each_figure(checkout: Path) -> None:
    files = house.sources(checkout)
    assert {source.module for source in files} == {"ckpt.cli", "ckpt.cli.run", "ckpt", "ckpt.a", "ckpt.b"}
    figures = house.figures(files, checkout)
    expected = {
        "files": 5,
        "loose files in ckpt/": 3,
        "widest folder": "ckpt",
        "groups of files in a circle": 1,  # a → b → a, though only type checkers see the second arrow
        "class names used twice": 1,
        "functions over 60 lines": 1,
        "parameters, most": 13,
        "private functions used once, %": 100.0,
        "assert … is not None": 1,
        "vague names": 1,
    }
    assert {name: figures[name] for name in expected} == expected
    assert house.rooms(files)["ckpt.cli"][0] == 2
    assert "ckpt/a.py:3: vague name: found" in list(house.debts(files, checkout))


def test_circles() -> None:
    assert house.circles({"a": {"b"}, "b": {"c", "d"}, "d": {"b"}}) == [{"b", "d"}]
    assert house.circles({"a": {"b", "c"}, "b": {"c"}}) == []
