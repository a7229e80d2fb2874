"""Translations that come with the package, one TOML file each (docs/formats.md)."""
