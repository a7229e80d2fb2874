"""The environment variables: what they may hold, and that their table and the user's page name the same ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckpt import settings
from ckpt.errors import UsageError
from ckpt.settings import NAMES, warn_of_misspelt

ROOT = Path(__file__).parent.parent


def test_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPT_DIRECT", raising=False)
    assert settings.direct() == "auto"
    for mode in ("auto", "on", "off"):
        monkeypatch.setenv("CKPT_DIRECT", mode)
        assert settings.direct() == mode
    monkeypatch.setenv("CKPT_DIRECT", "yes")
    with pytest.raises(UsageError, match="CKPT_DIRECT"):
        settings.direct()


def test_every_variable_is_documented() -> None:
    read = set(re.findall(r'"(CKPT_\w+)"', Path(settings.__file__).read_text()))
    table = set(re.findall(r"^``(CKPT_\w+)``", settings.__doc__ or "", re.MULTILINE))
    page = set(re.findall(r"^\| `(CKPT_\w+)` \|", (ROOT / "docs" / "environment.md").read_text(), re.MULTILINE))
    assert read == table == page == set(NAMES)
    assert "CKPT_DIRECT" in read


def test_a_misspelt_variable_is_named_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Not those of the user that only begin like ours."""
    for name in ("CKPT_TIMOUT", "CKPT_DIR", "CKPT_PATH", "CKPT_TIMEOUT"):
        monkeypatch.setenv(name, "5")
    warn_of_misspelt.cache_clear()
    assert settings.timeout(None) == settings.timeout(None) == 5
    assert [record.getMessage() for record in caplog.records] == [
        "the environment variable CKPT_TIMOUT is ignored: ckpt has none of this name. Did you mean CKPT_TIMEOUT?"
    ]
