"""Plans: what is read, written and copied, as pure data. No torch, no I/O."""
