"""Runs a command in this process."""

from __future__ import annotations

from click.testing import CliRunner, Result

from ckpt.cli.main import cli


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])
