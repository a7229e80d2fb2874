"""Entry point of the ``ckpt`` script: Ctrl-C is quiet from the first moment, also while modules are imported.

An interrupt in the middle of an import raises wherever the import is, through other people's code. Until a command's own code runs nothing
has been begun that would need an end, so the process just ends. :mod:`ckpt.cli.main` takes over when it calls the command.
"""

from __future__ import annotations

import signal
import sys
from importlib.util import find_spec

from .interrupts import quit_at_once


def main() -> None:
    """Run the command line and exit."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not under nohup, nor where somebody else decides
        signal.signal(signal.SIGINT, quit_at_once)
    if find_spec("click") is None:  # and then others that ckpt depends on
        sys.stderr.write("error: the command needs click, which is not installed\n  try: pip install ckpt-toolkit, with its dependencies\n")
        sys.exit(2)
    from .main import cli

    cli.main()
