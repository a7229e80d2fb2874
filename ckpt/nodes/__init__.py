"""Checkpoints on the machines of a job: files on their disks, and in the memory that a daemon on each holds (``memory``)."""
