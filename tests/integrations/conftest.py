"""The fixture of the tests that need several processes."""

from tests.distributed.conftest import ranks

__all__ = ["ranks"]
