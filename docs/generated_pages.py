"""Pages that the site has and the repository does not: the API, a page per module, and the options of all commands.

``docs/site_hooks.py`` adds them when mkdocs builds the site. They say what docstrings and ``ckpt COMMAND --help`` say.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import click  # noqa: E402

import ckpt  # noqa: E402
from ckpt import converters, errors, formats, io_backends, live, monitors, policies, testing, training  # noqa: E402
from ckpt.cli.main import COMMANDS, cli  # noqa: E402
from ckpt.integrations import engines  # noqa: E402

MODULES = (
    (
        "api/ckpt.md",
        "ckpt: save and load",
        ckpt,
        ("save", "save_async", "load", "open", "verify", "copy", "latest", "list_steps", "fence", "configure_storage"),
    ),
    (
        "api/reports.md",
        "ckpt: values and reports",
        ckpt,
        ("Job", "ReadOptions", "PerRank", "SaveHandle", "SaveReport", "LoadReport", "VerifyReport", "CopyReport", "View"),
    ),
    (
        "api/checkpointer.md",
        "ckpt: the training loop",
        ckpt,
        (
            "Checkpointer",
            "RestoredFrom",
            "BeginFrom",
            "SharedLocal",
            "NodeLocal",
            "Memory",
            "Member",
            "MemberChanges",
        ),
    ),
    (
        "api/layouts.md",
        "ckpt: layouts",
        ckpt,
        (
            *("Layout", "Mesh", "Shard", "Replicate", "Flat", "Interleaved", "Padded", "Uneven", "GlobalShape", "Stage", "OnMesh"),
            *("Numbered", "pipeline", "experts"),
        ),
    ),
    (
        "api/formats-and-names.md",
        "ckpt: formats and names",
        ckpt,
        ("convert", "merge", "export", "translated", "Translation", "ConvertReport", "MergeReport", "ExportReport", "MegatronParallel"),
    ),
    ("api/policies.md", "ckpt.policies", policies, tuple(name for name in policies.__all__ if name != "Any")),
    ("api/training.md", "ckpt.training", training, tuple(training.__all__)),
    ("api/testing.md", "ckpt.testing", testing, tuple(testing.__all__)),
    ("api/live.md", "ckpt.live", live, tuple(live.__all__)),
    ("api/monitors.md", "ckpt.monitors", monitors, tuple(monitors.__all__)),
    ("api/io_backends.md", "ckpt.io_backends", io_backends, tuple(io_backends.__all__)),
    ("api/formats.md", "ckpt.formats", formats, tuple(formats.__all__)),
    ("api/converters.md", "ckpt.converters", converters, tuple(converters.__all__)),
    ("api/engines.md", "ckpt.integrations.engines", engines, tuple(engines.__all__[::-1])),
    ("api/errors.md", "ckpt.errors", errors, ()),
)
"""Page, title, module, names in it."""
COMMANDS_PAGE = "commands.md"
_GENERAL = {"--json", "--quiet", "--verbose", "--color", "--help"}
"""Options of every command."""


def pages() -> dict[str, str]:
    """Path below docs/ → Markdown of every generated page, in the order of the navigation."""
    return {**{path: _module(title, module, names) for path, title, module, names in MODULES}, COMMANDS_PAGE: _commands()}


def _module(title: str, module: Any, names: tuple[str, ...]) -> str:
    lines = [f"# {title}", "", *(() if names else _text(module.__doc__))]
    for name in names:
        lines += _entry(name, getattr(module, name))
    return "\n".join(lines).rstrip() + "\n"


def leaf_commands() -> Iterator[tuple[str, click.Command]]:
    """Every command that runs, by its whole name: ``ls``, ``lora merge``."""
    for name in COMMANDS:
        command = cli.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None
        commands = command.commands if isinstance(command, click.Group) else {"": command}
        yield from ((f"{name} {below}".rstrip(), each) for below, each in commands.items())


def _commands() -> str:
    lines = [
        "# Options of all commands",
        "",
        "`ckpt COMMAND --help` prints the same. Every command also takes `--json`, `-q`, `-v`, `--color` and `--help`.",
        "",
    ]
    for name, command in leaf_commands():
        context = click.Context(command, info_name=f"ckpt {name}")
        text, _, example = inspect.cleandoc(command.help or "").partition("\b\nExample:\n")
        usage = " ".join(command.collect_usage_pieces(context))
        lines += [f"## ckpt {name}", "", "```text", f"ckpt {name} {usage}", "```", "", text.replace("\b\n", "").strip(), ""]
        lines += ["```sh", inspect.cleandoc(example), "```", ""] if example else []
        rows = []
        for option in command.get_params(context):
            record = option.get_help_record(context) if isinstance(option, click.Option) else None
            if record is not None and not _GENERAL & set(option.opts):
                rows.append(f"| `{_cell(record[0])}` | {_cell(record[1])} |")
        lines += ["| option | meaning |", "|---|---|", *rows, ""] if rows else []
    return "\n".join(lines).rstrip() + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _entry(name: str, value: Any) -> list[str]:
    lines = [f"## {name}", ""]
    if not (inspect.isclass(value) or inspect.isfunction(value)):  # a table, such as the rules of --keep
        return [*lines, "; ".join(f"`{v}`" for v in value.values()), ""]
    kind = "class " if inspect.isclass(value) else ""
    lines += ["```python", f"{kind}{name}{_signature(value)}", "```", "", *_text(value.__doc__)]
    for member, found in vars(value).items() if inspect.isclass(value) else ():
        if not member.startswith("_") and found.__doc__ and (inspect.isfunction(found) or isinstance(found, property)):
            lines += [f"### {name}.{member}", ""]
            if not isinstance(found, property):
                lines += ["```python", f"{member}{_signature(found)}", "```", ""]
            lines += _text(found.__doc__)
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
    if len(line) < 88:
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
    if parameter.default is os.environ:  # not the variables of whoever builds the site
        return f"{text} = os.environ"
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
