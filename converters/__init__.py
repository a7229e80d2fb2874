"""Checkpoints of one format in another: written (``convert``), pointed at (``virtual``), in other names (``mapping``), compared
(``compare``), and the model of a running job (``export``). docs/architecture.md has the rooms and their order."""
