"""The command line: one file per command. Nothing heavier than click is imported until a command needs it."""
