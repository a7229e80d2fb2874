"""How long phases took and training waited: spans, and their export to profilers. No torch but in profiling."""
