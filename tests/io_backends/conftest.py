"""The suite that the package ships fails as readably as the tests beside it."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("ckpt.io_backends.conformance_reading", "ckpt.io_backends.conformance_writing")
