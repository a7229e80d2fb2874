"""Checkpoints whose files are spread over the nodes of a job: each file on the disk of the node that wrote it, and on a few others."""
