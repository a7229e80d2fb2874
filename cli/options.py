"""Options that several commands have, and groups of commands."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce, wraps
from typing import TYPE_CHECKING, Any, ClassVar

import click

from ckpt import units
from ckpt.errors import UsageError
from ckpt.text import did_you_mean

from .output import URL, Command, GroupedOption, OneOf, Output, style

if TYPE_CHECKING:
    from ckpt.converters.convert import ConvertReport, Part
    from ckpt.net.divided_work import DividedWork
    from ckpt.plan.views import LogicalTensor


INTERRUPTED = "run the same command again to resume: files that are complete are not written again; `ckpt gc --yes` removes them"


def grouped(group: str, *names: str, **attributes: Any) -> Callable[[Command], Command]:
    """An option that ``--help`` shows in a group."""
    return click.option(*names, cls=GroupedOption, group=group, **attributes)


def file_options(place: str) -> Callable[[Command], Command]:
    """How files of any format are written, over what is at ``place`` or not. The command takes ``--no-config`` as ``require_config``."""
    config = "For hf: a config.json, or a model's directory with it and tokenizer."
    made = (
        grouped("Output", "--config", metavar="PATH", type=URL, is_eager=True, help=config),
        grouped("Output", "--no-config", "require_config", is_flag=True, callback=_inverted, help="For hf: a config.json is not needed."),
        grouped(
            "Output", "--shard-size", callback=parse_size, metavar="SIZE", help="Approximate file size. [default: hf 5GB, others 4GiB]"
        ),
        grouped("Output", "--overwrite", is_flag=True, help=f"Replace a checkpoint at {place}; native only."),
        grouped("Output", "--verify", is_flag=True, help="Read each written file again and compare it."),
        grouped("Output", "--dry-run", is_flag=True, help="Only list what would be written."),
    )
    return lambda command: reduce(lambda so_far, option: option(so_far), reversed(made), command)


def _inverted(context: click.Context, parameter: click.Parameter, flag: bool) -> bool:  # noqa: FBT001 - click's arguments
    if flag and context.params.get("config") is not None:
        raise click.UsageError("--config names a configuration, and --no-config states that none is needed: give one of them")
    return not flag


def parse_size(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """Bytes of ``5GB``, ``512MiB``, ``1000000B``: without a unit nobody knows what was meant."""
    if text is not None and text.strip().replace(".", "").isdigit():
        raise click.BadParameter(f"{text!r} has no unit: write {text}GB, {text}MiB or {text}B, which is bytes")
    try:
        return None if text is None else units.parse_size(text)
    except UsageError as err:
        raise click.BadParameter(err.message) from err


def time_option(name: str, *, default: str, help: str) -> Callable[[Command], Command]:
    """A time such as ``36h``, ``90min`` or ``1d12h``, which the command takes in seconds."""

    def parse(context: click.Context, parameter: click.Parameter, text: str) -> float:
        seconds = units.seconds(text)
        if seconds is None:
            raise UsageError(f"{text!r} is not a time with a unit", where=name, hint="30s, 90min, 36h, 1d12h, or 0")
        return seconds

    return click.option(name, default=default, metavar="TIME", show_default=True, callback=parse, help=help)


def parse_mesh(context: click.Context, parameter: click.Parameter, text: str | None) -> dict[str, int] | None:
    """Sizes by dimension of ``pp=4,dp=8,tp=8``."""
    sizes: dict[str, int] = {}
    for part in () if text is None else text.split(","):
        name, _, size = part.strip().partition("=")
        if not name or name in sizes or not (size.isascii() and size.isdecimal() and len(size) < 9 and int(size)):
            hint = "each dimension has a name of its own, and at least one rank"
            raise UsageError(f"{text!r} is not a mesh such as pp=4,dp=8,tp=8", where=parameter.opts[0], hint=hint)
        sizes[name] = int(size)
    if math.prod(sizes.values()) >= 1 << 24:
        raise UsageError("a mesh has fewer than 16,777,216 ranks", where=parameter.opts[0])
    return None if text is None else sizes


def part_of_job(work: DividedWork | None) -> Part | None:
    """This process's part: of the work that it divides with others, or by ``--part``, or RANK and WORLD_SIZE, of processes that do not
    communicate."""
    from ckpt.net.group import rank_and_size

    from .dividing import is_alone, single_part

    if is_alone():
        return None
    if (part := single_part()) is not None:
        return part
    if work is not None:
        return work
    rank, size = rank_and_size()
    return (rank, size) if size > 1 else None


# Options of the commands that translate names and layouts of tensors: which mapping, into which convention, what to skip.

_MAPPINGS = ("llama", "mixtral", "qwen-moe", "deepseek-v3", "llama-plain", "transformers-moe", "transformers-mixtral")
_CONVENTIONS = ("huggingface", "megatron", "plain", "transformers")
_option = partial(click.option, cls=GroupedOption, group="Naming")


@dataclass(frozen=True, slots=True)
class MappingChoice:
    """The values of ``--names``, ``--convention`` and ``--set``."""

    names: str | None
    convention: str | None
    numbers: tuple[str, ...]


def mapping_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--names``, ``--convention`` and ``--set``; the command takes them as one ``mapping``."""

    @wraps(command)
    def with_mapping(*args: Any, names: str | None, convention: str | None, numbers: tuple[str, ...], **options: Any) -> Any:
        return command(*args, mapping=MappingChoice(names, convention, numbers), **options)

    names = _option(
        "--names",
        metavar="MAPPING",
        type=OneOf(_MAPPINGS, open_ended=True),
        help=f"Translate names and layouts of tensors: {', '.join(_MAPPINGS)}, or the path of a .toml file. llama covers Mistral and Qwen.",
    )
    convention = _option(
        "--convention",
        metavar="NAME",
        type=OneOf(_CONVENTIONS, open_ended=True),
        help=f"The convention to translate to: {', '.join(_CONVENTIONS)}.",
    )
    numbers = _option("--set", "numbers", multiple=True, metavar="NAME=N", help="A number that the model's files lack, e.g. heads=32.")
    return names(convention(numbers(with_mapping)))


def skip_option(command: Command) -> Command:
    """``--skip``; the command takes it as ``skip``."""
    text = "Leave out tensors whose name in SRC matches GLOB, before --names applies. Repeatable."
    return click.option("--skip", cls=GroupedOption, group="Selection", multiple=True, metavar="GLOB", help=text)(command)


def views_of(
    source: str, mapping: MappingChoice, config: str | None = None
) -> Callable[[Mapping[str, Sequence[int]]], dict[str, LogicalTensor]] | None:
    """The translation that the options ask for; None if they ask for none. A ``config`` of transformers has numbers of the model too."""
    if (mapping.convention is None) != (mapping.names is None):
        raise UsageError("--names and --convention are only valid together", hint="--names llama --convention megatron")
    if mapping.convention is None or mapping.names is None:
        if mapping.numbers:
            raise UsageError("--set is only valid with --names", hint="--names llama --convention megatron")
        return None
    from ckpt.converters.mapping.convention import translated_views
    from ckpt.converters.targets.hf import read_configuration

    numbers = {**read_configuration(config).numbers, **parse_numbers(mapping.numbers, "--set", "query_groups=8")}
    return translated_views(source, mapping.names, mapping.convention, numbers)


def left_out_message(names: Sequence[str]) -> str:
    """The message about tensors and values of the source that the target does not have."""
    return f"left out: {units.plural(len(names), 'name')}, such as {names[0]}"


def tell_written(report: ConvertReport, output: Output, *, dry_run: bool, verb: str = "write", detail: str = "") -> None:
    """Say what a conversion wrote, or would write."""
    contents = f"{units.plural(report.tensors, 'tensor')}, {units.size(report.tensor_bytes)} in {units.plural(len(report.files), 'file')}"
    size = units.size(report.written_bytes)
    if dry_run:
        output.line(f"would {verb} {contents}{detail}, {size} to write")
    else:
        again = report.finished and not report.written_files
        verdict = style("ok, complete already" if again else "ok", "green") if report.finished else "this part is done, others are not yet"
        output.line(f"{verdict}: {report.target}: {contents}{detail}, {size} written in {units.duration(report.seconds)}")
    if report.left_out:
        output.talk(left_out_message(report.left_out))
    for note in report.notes if report.finished else ():
        output.talk(note)


def parse_numbers(texts: Sequence[str], option: str, example: str) -> dict[str, int]:
    """The numbers of an option that is given as ``NAME=N``, any number of times."""
    numbers = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value.isdecimal():
            raise UsageError(f"{option} expects NAME=N, not {text!r}", hint=f"{option} {example}")
        numbers[name] = int(value)
    return numbers


# Commands that consist of commands, such as ``ckpt`` itself and ``ckpt lora``.

_OWN = {"-h", "--help", "--version"}
"""Options of a group itself; all others are those of its commands."""


class UnknownName(click.UsageError):
    """A name on the command line that does not exist, with the names that are close to it."""

    def __init__(self, message: str, ctx: click.Context, suggestion: str | None) -> None:
        super().__init__(message, ctx)
        self.suggestion = suggestion


class CommandGroup(click.Group):
    """Options may stand before the name of a command, a wrong name has a suggestion, and no name at all is a question for help."""

    elsewhere: ClassVar[Mapping[str, str]] = {}
    """What other tools call a command → its name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, options_behind_name(args) or ["--help"])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if args and args[0] not in names and not args[0].startswith("-"):
            meant = self.elsewhere.get(args[0])
            raise UnknownName(f"no command {args[0]!r}", ctx, f"did you mean {meant}?" if meant else did_you_mean(args[0], names))
        return super().resolve_command(ctx, args)


def options_behind_name(args: Sequence[str]) -> list[str]:
    """``--json ls URL`` as ``ls --json URL``."""
    at = 0
    while at < len(args) and args[at].startswith("-"):
        at += 2 if args[at] == "--color" else 1
    if at >= len(args):
        return list(args)
    before = args[:at]
    return [*(arg for arg in before if arg in _OWN), args[at], *(arg for arg in before if arg not in _OWN), *args[at + 1 :]]
