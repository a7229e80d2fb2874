"""The behaviour tables of ``protocol`` as a pytest suite. Subclass it where pytest looks, and give it a fresh, empty backend::

    class TestMyBackend(BackendConformance):
        @pytest.fixture
        def backend(self):
            return MyBackend("my://...")  # empty, not prepared

Invariant: only the port is used, so that the suite fits any backend. For failures that show values, call
``pytest.register_assert_rewrite`` with ``ckpt.io_backends.conformance.reading`` and ``…_writing`` in a ``conftest.py``, before the import.
"""

from __future__ import annotations

from .reading import ArgumentsRows, ListingRows, ReadingRows
from .writing import DeletingRows, PreparingRows, PublishingRows, WritingRows


class BackendConformance(ArgumentsRows, ReadingRows, ListingRows, WritingRows, PublishingRows, DeletingRows, PreparingRows):
    """Every row of the tables that shows through the port. Set ``exclusive_create`` to False where the storage cannot promise it."""
