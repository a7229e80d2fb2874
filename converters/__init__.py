"""Conversions between checkpoint formats. Above ``formats`` and below ``cli``; empty until the first foreign format is read."""
