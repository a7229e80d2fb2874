"""Writes docs/api.md from the docstrings of the public names: ``python docs/build_api.py`` (or ``make api``)."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import ckpt  # noqa: E402
from ckpt import converters, data, ema, errors, formats, io_backends, live, monitors, policies, rng  # noqa: E402
from ckpt.integrations import engines  # noqa: E402

SECTIONS = (
    ("Saving and loading", ckpt, ("save", "save_async", "load", "open", "verify", "copy", "list_steps", "fence", "configure_storage")),
    ("What they take and give", ckpt, ("PerRank", "SaveHandle", "SaveReport", "LoadReport", "VerifyReport", "CopyReport", "View")),
    ("The training loop", ckpt, ("Checkpointer", "RestoredFrom", "BeginFrom", "NodeLocal", "Memory")),
    ("Layouts of plain tensors", ckpt, ("Layout", "Mesh")),
    ("Placements", ckpt, ("Shard", "Replicate", "Flat", "Interleaved", "Padded", "Uneven", "GlobalShape", "Stage", "OnMesh")),
    ("Numbered layers and experts", ckpt, ("Numbered", "pipeline", "experts")),
    ("Policies: `ckpt.policies`", policies, tuple(name for name in policies.__all__ if name != "Any")),
    (
        "Other formats and names",
        ckpt,
        ("convert", "merge", "export", "translated", "ConvertReport", "MergeReport", "ExportReport", "MegatronParallel"),
    ),
    ("Data loaders: `ckpt.data`", data, tuple(data.__all__)),
    ("Moving averages: `ckpt.ema`", ema, tuple(ema.__all__)),
    ("Random numbers: `ckpt.rng`", rng, tuple(rng.__all__)),
    ("Live state: `ckpt.live`", live, tuple(live.__all__)),
    ("Monitors: `ckpt.monitors`", monitors, tuple(monitors.__all__)),
    ("Storage: `ckpt.io_backends`", io_backends, tuple(io_backends.__all__)),
    ("Reading further formats: `ckpt.formats`", formats, tuple(formats.__all__)),
    ("Writing further formats: `ckpt.converters`", converters, tuple(converters.__all__)),
    ("Weights of generation engines: `ckpt.integrations.engines`", engines, tuple(engines.__all__[::-1])),
    ("Errors: `ckpt.errors`", errors, ()),
)
"""Title, module, names in it."""

_RULE = """Made from the docstrings by `make api`; do not edit.

Public are the functions and classes of `ckpt`, and the names that this page lists for its modules: `ckpt.errors`, `ckpt.policies`,
`ckpt.data`, `ckpt.rng`, `ckpt.live`, `ckpt.monitors`, `ckpt.io_backends` (with `ckpt.io_backends.conformance`, tests for a backend
of your own), `ckpt.formats`, `ckpt.converters`, and the modules of `ckpt.integrations` ([integrations.md](integrations.md)).
Functions are verbs, as in `ckpt.export`; modules are nouns. Everything else in the package is internal and may change in any
release.

Where a parameter is a URL, it takes a URL or path as text, or a local path as `pathlib.Path`."""


def page() -> str:
    """The whole of docs/api.md."""
    lines = ["# API", "", *_RULE.splitlines(), ""]
    for title, module, names in SECTIONS:
        lines += [f"## {title}", ""]
        if not names:
            lines += _text(module.__doc__)
        for name in names:
            lines += _entry(name, getattr(module, name))
    return "\n".join(lines).rstrip() + "\n"


def _entry(name: str, value: Any) -> list[str]:
    lines = [f"### `{name}`", ""]
    if not (inspect.isclass(value) or inspect.isfunction(value)):  # a table, such as the rules of --keep
        return [*lines, "; ".join(f"`{v}`" for v in value.values()), ""]
    kind = "class " if inspect.isclass(value) else ""
    lines += ["```python", f"{kind}{name}{_signature(value)}", "```", "", *_text(value.__doc__)]
    for member, found in vars(value).items() if inspect.isclass(value) else ():
        if not member.startswith("_") and found.__doc__ and (inspect.isfunction(found) or isinstance(found, property)):
            said = member if isinstance(found, property) else f"{member}{_signature(found)}"
            lines += [f"#### `{name}.{said}`", "", *_text(found.__doc__)]
    return lines


def _signature(value: Any) -> str:
    """As it would be written; one parameter a line if it is long. Without ``self``, and without what a class's call returns."""
    try:
        found = inspect.signature(value)
    except ValueError:  # an exception class: whatever BaseException takes
        return "(*args)"
    parts, before = [], None
    for parameter in found.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and before not in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL):
            parts.append("*")
        before = parameter.kind
        parts.append(_parameter(parameter))
    returns = "" if inspect.isclass(value) or found.return_annotation is found.empty else f" -> {_annotation(found.return_annotation)}"
    line = f"({', '.join(parts)}){returns}"
    if len(line) < 100:
        return line
    lines = "".join(f"    {part},\n" for part in parts)
    return f"(\n{lines}){returns}"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = f"{stars}{parameter.name}"
    if parameter.annotation is not parameter.empty:
        text += f": {_annotation(parameter.annotation)}"
    if parameter.default is parameter.empty:
        return text
    default = re.sub(
        r"<\w+\.(\w+): \d+>", r"\1", re.sub(r"<function [^>]*>+ at 0x\w+>|<function \S+ at 0x\w+>", "…", repr(parameter.default))
    ).replace("<factory>", "…")  # members of enumerations by name
    return f"{text} = {default}"


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _text(doc: str | None) -> list[str]:
    """A docstring as Markdown: sections as bold words and lists, double backquotes as single ones, roles as plain names."""
    text = inspect.cleandoc(doc or "")
    text = re.sub(r":\w+:`([^`]+)`", r"`\1`", text).replace("``", "`").replace("::\n", ":\n")
    lines: list[str] = []
    listed = False
    for line in text.split("\n"):
        heading = re.fullmatch(r"(Args|Raises|Returns):", line)
        item = re.fullmatch(r"    (\S[^:]*): (.*)", line) if listed else None
        listed = (listed and line.startswith(" ")) or heading is not None
        if heading is not None:
            lines += [f"**{heading[1]}**", ""]
        else:
            lines.append(f"* `{item[1]}`: {item[2]}" if item else f"  {line.strip()}" if listed else line)
    return [*lines, ""]


if __name__ == "__main__":
    (ROOT / "docs" / "api.md").write_text(page(), encoding="utf-8")
