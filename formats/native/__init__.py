"""The native format, version 1: docs/format.md is its specification."""
