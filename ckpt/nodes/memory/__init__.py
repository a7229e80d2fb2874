"""The memory of a machine that outlives its trainers: a daemon that holds objects in anonymous files, and its client. No torch.

    trainer                                    daemon (one per machine and user)             reader
      │ lend: so many bytes ─────────────────────► │ an anonymous file, fresh or used before     │
      │ ◄──────────────────────── the file itself ─│                                             │
      │ fills its mapping of it; then: put ──────► │ now the object has its name                 │
      │                                            │ ◄──────────────────────────────────── get ──│
      │                                            │── the file, to be read only ───────────────►│

No byte of an object goes through the daemon: both ends map the same pages. What a process that dies has borrowed goes with its connection.
"""
