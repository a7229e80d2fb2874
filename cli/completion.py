"""``ckpt completion``: the script that makes a shell complete commands, options and paths."""

from __future__ import annotations

import click

from ckpt.cli.console.output import OneOf, Output, options

_SHELLS = ("bash", "zsh", "fish")


@click.command("completion", short_help="Print the completion script of a shell.")
@click.argument("shell", type=OneOf(_SHELLS))
@options
def command(shell: str, *, as_json: bool, quiet: bool) -> None:
    """Print the script that lets SHELL (bash, zsh or fish) complete commands, options, their values and paths.

    \b
    Example:
      eval "$(ckpt completion bash)"                             # in ~/.bashrc
      eval "$(ckpt completion zsh)"                              # in ~/.zshrc
      ckpt completion fish > ~/.config/fish/completions/ckpt.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None  # click knows these three
    root = click.get_current_context().find_root().command
    complete = kind(root, {}, "ckpt", "_CKPT_COMPLETE")
    script = complete.source_template % complete.source_vars()  # source() would start a bash to ask for its version
    if as_json:
        Output(json=True).document({"shell": shell, "script": script})
    else:
        click.echo(script)
