"""``python -m ckpt``: the command, where its script is not on the path."""

from __future__ import annotations

from ckpt.cli.start import main

if __name__ == "__main__":
    main()
