"""Figures of the package's own sources, from their syntax trees alone: ``python -m benchmarks.house``.

The first table has the whole: files, folders, circles, names, functions, parameters, comments. The second has the rooms: files and lines of
each. ``--debts PATH…`` lists each place behind a figure in some folders or files. ``--json`` is for diffs; ``--root`` names
another checkout. The limits stand in tests/test_house.py; this script only counts.
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

BESIDE = ("cli", "converters", "formats", "io_backends")
"""Folders beside ckpt/ that are packages inside it."""
VAGUE = frozenset({"found", "said", "told", "held", "whole"})
"""Names that tell a place in a sentence and not what a thing is."""
LONG_FUNCTION, LONG_FILE, MANY_PARAMETERS = 60, 350, 12

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file, under the name that it is imported by."""

    module: str
    path: Path
    text: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text)))

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @property
    def comments(self) -> int:
        return sum(line.lstrip().startswith("#") for line in self.text.splitlines())

    @property
    def room(self) -> str:
        """The folder that it lies in, as a package; of deep ones the first two below ckpt, where that is how the package is cut."""
        folder = (self.module if self.path.name == "__init__.py" else self.module.rpartition(".")[0]).split(".")
        return ".".join(folder[: 3 if folder[1:2] in (["engine"], ["converters"], ["formats"]) else 2])

    @property
    def functions(self) -> list[Function]:
        return [node for node in self.nodes if isinstance(node, Function)]

    @cached_property
    def uses(self) -> Counter[str]:
        names = (node.id if isinstance(node, ast.Name) else node.attr for node in self.nodes if isinstance(node, ast.Name | ast.Attribute))
        return Counter(names)

    @property
    def private(self) -> list[Function]:
        return [node for node in self.functions if node.name.startswith("_") and not node.name.startswith("__")]

    @property
    def used_once(self) -> list[Function]:
        return [node for node in self.private if self.uses[node.name] <= 1]

    @property
    def asserts(self) -> list[ast.Assert]:
        """Those that tell a type checker that something is there."""
        return [node for node in self.nodes if isinstance(node, ast.Assert) and "is not None" in ast.unparse(node.test)]

    @property
    def vague(self) -> list[tuple[int, str]]:
        named = (
            (node.lineno, node.id if isinstance(node, ast.Name) else node.arg)
            for node in self.nodes
            if isinstance(node, ast.Name | ast.arg)
        )
        return [(line, name) for line, name in named if name in VAGUE]


def size(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def parameters(node: Function) -> int:
    return len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)


def sources(root: Path) -> list[Source]:
    """All files of the package below ``root``, a checkout. What is behind the links in ckpt/ counts once."""
    files = [(path, path.relative_to(root)) for path in (root / "ckpt").rglob("*.py") if path.relative_to(root).parts[1] not in BESIDE]
    files += [(path, Path("ckpt") / path.relative_to(root)) for folder in BESIDE for path in (root / folder).rglob("*.py")]
    names = [(path, ".".join(name.with_suffix("").parts).removesuffix(".__init__")) for path, name in files]
    return [Source(module=module, path=path, text=path.read_text(encoding="utf-8")) for path, module in sorted(names)]


# ------------------------------------------------------------------------------------------------------------ circles


def imports(source: Source, modules: set[str]) -> set[str]:
    """The modules of the package that a file imports, wherever in it: also inside functions and for type checkers only."""
    package = source.module if source.path.name == "__init__.py" else source.module.rpartition(".")[0]
    targets: set[str] = set()
    for node in source.nodes:
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (above, node.module) if part)
            targets |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base for alias in node.names}
    return (targets & modules) - {source.module, "ckpt"}  # ckpt/__init__ imports everything, lazily


def circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules that reach each other: Tarjan's strongly connected components, those of more than one."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[set[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in sorted(edges.get(module, ())):
            if target not in index:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], index[target])
        if low[module] == index[module]:
            at = stack.index(module)
            groups.append(set(stack[at:]))
            del stack[at:]

    for module in sorted(edges):
        if module not in index:
            visit(module)
    return [group for group in groups if len(group) > 1]


# ------------------------------------------------------------------------------------------------------------ figures


def percent(part: int, of: int) -> float:
    return round(100 * part / of, 1) if of else 0.0


def figures(files: list[Source], root: Path) -> dict[str, int | float | str]:
    """What the table shows, in its order."""
    modules = {source.module for source in files}
    folders = Counter(source.path.parent for source in files)
    widest, width = folders.most_common(1)[0]
    classes = Counter(node.name for source in files for node in source.nodes if isinstance(node, ast.ClassDef))
    functions = [node for source in files for node in source.functions]
    sizes = [size(node) for node in functions]
    counts = [parameters(node) for node in functions]
    private, once = sum(len(source.private) for source in files), sum(len(source.used_once) for source in files)
    lines, comments = sum(source.lines for source in files), sum(source.comments for source in files)
    return {
        "files": len(files),
        "lines": lines,
        "rooms": len({source.room for source in files}),
        "loose files in ckpt/": folders[root / "ckpt"],
        "files in the widest folder": width,
        "widest folder": str(widest.relative_to(root)),
        f"files over {LONG_FILE} lines": sum(source.lines > LONG_FILE for source in files),
        "groups of files in a circle": len(
            circles({source.module: imports(source, modules) for source in files if source.module != "ckpt"})
        ),
        "class names used twice": sum(count > 1 for count in classes.values()),
        "functions": len(functions),
        "lines of a function, median": statistics.median(sizes),
        "lines of a function, p90": statistics.quantiles(sizes, n=10)[-1],
        "lines of a function, most": max(sizes),
        f"functions over {LONG_FUNCTION} lines": sum(count > LONG_FUNCTION for count in sizes),
        "parameters, most": max(counts),
        f"functions over {MANY_PARAMETERS} parameters": sum(count > MANY_PARAMETERS for count in counts),
        "private functions": private,
        "private functions used once, %": percent(once, private),
        "comment lines per 100": percent(comments, lines),
        "assert … is not None": sum(len(source.asserts) for source in files),
        "vague names": sum(len(source.vague) for source in files),
    }


def rooms(files: list[Source]) -> dict[str, tuple[int, int]]:
    """Room → its files and lines, the largest first."""
    grouped: dict[str, list[Source]] = defaultdict(list)
    for source in files:
        grouped[source.room].append(source)
    counts = {room: (len(members), sum(source.lines for source in members)) for room, members in grouped.items()}
    return dict(sorted(counts.items(), key=lambda item: -item[1][1]))


def debts(files: list[Source], root: Path) -> Iterator[str]:
    """A line for each place behind a figure, as editors read it: path, line, what."""
    for source in files:
        path = source.path.relative_to(root)
        if source.lines > LONG_FILE:
            yield f"{path}:1: {source.lines} lines"
        places = [(node.lineno, f"{node.name} has {size(node)} lines") for node in source.functions if size(node) > LONG_FUNCTION]
        many = [node for node in source.functions if parameters(node) > MANY_PARAMETERS]
        places += [(node.lineno, f"{node.name} has {parameters(node)} parameters") for node in many]
        places += [(node.lineno, f"private, used once: {node.name} ({size(node)} lines)") for node in source.used_once]
        places += [(node.lineno, ast.unparse(node)) for node in source.asserts]
        places += [(line, f"vague name: {name}") for line, name in source.vague]
        yield from (f"{path}:{line}: {text}" for line, text in sorted(places))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.house", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent, help="the checkout; by default this one")
    parser.add_argument(
        "--debts", type=Path, nargs="+", metavar="PATH", help="list the places behind the figures in these folders or files"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    files = sources(root)
    if arguments.debts:
        chosen = [path.resolve() for path in arguments.debts]
        print(*debts([source for source in files if any(source.path.is_relative_to(path) for path in chosen)], root), sep="\n")
        return
    shown, sizes = figures(files, root), rooms(files)
    if arguments.json:
        print(json.dumps({"figures": shown, "rooms": sizes}, ensure_ascii=False))
        return
    for name, value in shown.items():
        print(f"{name:<34}{value:>12}")
    print(f"\n{'ROOM':<34}{'FILES':>6}{'LINES':>8}")
    for room, (count, lines) in sizes.items():
        print(f"{room:<34}{count:>6}{lines:>8}")


if __name__ == "__main__":
    main()
