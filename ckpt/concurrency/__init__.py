"""Threads, and pauses of the garbage collector."""
