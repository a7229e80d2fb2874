"""Tensors in other names: terms of a translation, the translations that come with ckpt, the numbers that they need. No torch."""
