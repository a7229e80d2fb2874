"""ckpt inside of other libraries' training loops. Each module needs the library that it is for; none is imported by ``import ckpt``."""
