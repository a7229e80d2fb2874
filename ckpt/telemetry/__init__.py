"""How long phases took and training waited: spans, progress, and their export. Imported by nearly everything."""
