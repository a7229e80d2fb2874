"""Sizes that are choices of this software: each rule once, in bytes, with the reason for its value. No imports.

Code asks for ``limits.CHUNK`` when it runs and keeps no copy: a test that sets one here reaches every place that follows the rule. What is
not here: limits that are part of the format (``formats/native``), what one kind of storage asks for (``io_backends``), and sizes that mean
something inside one algorithm only. No value depends on another, unless it says so.
"""

from __future__ import annotations

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# ------------------------------------------------------------------------------------------------------- what is stored

CHUNK = 64 * MIB
"""Largest chunk that is written, and largest share of one tensor that one thread reads. A digest, a header entry and a request for each 64
MiB cost nothing beside the bytes; several threads still share one tensor, and two of them (as stored, and decoded) fit every thread's
scratch. The format allows no larger ones (``CHUNK_LIMIT``)."""

UNDIVIDED = 64 * KIB
"""A replicated cell of fewer bytes is written whole by one replica, and a merged block by one of the ranks that hold parts of it: a chunk
for each of a thousand replicas of a bias would cost more in the index than is saved in writing."""

CODED_FILE = 128 * MIB
"""Most bytes, before coding, of the chunks that share a file with coded ones, unless it has a single chunk. They wait in memory until the
file is laid out, for only then it is known what each takes."""

DATA_FILE = 4 * GIB
"""About the size of a data file that conversions write, unless the caller says: few files, and each can be copied again in seconds."""

# --------------------------------------------------------------------------------------------- one call, one step of work

CACHE_BLOCK = MIB
"""Bytes that are copied, hashed and written in one step, alone or as neighbours together: so few that they stay in the second-level cache
from the first of the three to the last."""

PIECE = 2 * MIB
"""Bytes of a long range that are read, hashed and copied before the next ones. Twice a cache block: each read costs a system call and a
wake-up, and half of a piece is still in the cache."""

GROUPED_READ = 4 * MIB
"""Neighbouring small ranges are read together up to this many bytes, which still fit the last-level cache when they are hashed and
copied."""

DIRECT_READ = 8 * MIB
"""Bytes that one call reads straight into the memory where they belong. Nothing else touches them, so the cache does not matter, and longer
calls would only make a deadline be seen later."""

GAP = 32 * KIB
"""Bytes between two ranges that are read rather than skipped: one more call of a local file system takes as long as reading them. Storage
where calls are dearer asks for more (``IOHints.coalesce_gap``)."""

WORTH_A_CALL = 64 * KIB
"""A range of at least so many bytes is read or written by a call of its own; shorter ones go together with their neighbours, since the call
would take longer than the bytes."""

SMALL_COPY = 256 * KIB
"""Less is copied at once, by the thread that is at it, with the interpreter's lock: handing it over takes longer."""

SMALL_SHARED_READ = 256 * KIB
"""Chunks of fewer bytes that the same ranks want are one shared read; and what all other ranks together want less of is not shared: the
messages would cost more than reading it again."""

HASH_BUFFER = 16 * MIB
"""Bytes that a thread reads at once where it does nothing but hash, copy or send them on (verify, cp, import): long enough for storage
behind a network, short enough for dozens of threads."""

VALUE_BLOCK = 4 * MIB
"""Bytes of a tensor that a thread compares, casts or puts in order at once; both sides and the temporaries of numpy fit the cache."""

# ------------------------------------------------------------------------------------------------------ memory in all

SCRATCH = 448 * MIB
"""All threads of a load together have this much for coded chunks; threads that find none left wait. Seven chunks: with fewer threads
decoding, reading no longer keeps up with a local disk."""

CONVERT_MEMORY = GIB
"""Memory for tensors of a conversion, unless the caller says."""

EXPORT_MEMORY = 256 * MIB
"""Memory for windows of an export on each rank, unless the caller says: beside a model in training there is not much."""

LEAST_MEMORY = 32 * MIB
"""The least that a caller may give a conversion or an export. With less, nearly every chunk would be read more than once."""

# ----------------------------------------------------------------- what a reader takes from files that others have made

FOREIGN_TABLE = 256 * MIB
"""A table of contents in another format: an index of Hugging Face, the directory of a ``torch.save`` archive. Two to three million
entries; beyond that it is taken for damage or an attack, before memory is asked for."""

FOREIGN_PICKLE = GIB
"""A pickle that is read: building its objects takes up to some hundred times as much memory."""

SIDE_FILE = 64 * MIB
"""A file beside the weights (a tokenizer, a configuration) that a conversion copies along. A larger one is no such thing."""
