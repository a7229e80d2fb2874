"""Ties what a checkpoint has to the live objects of a state."""
