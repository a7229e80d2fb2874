"""What all commands share: output and tables, progress, Ctrl-C, and types of parameters."""
