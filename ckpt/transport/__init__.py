"""Bytes between the ranks of a job: TCP connections and shared memory that nothing else uses."""
