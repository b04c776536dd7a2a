"""Sizes and times as people write and read them."""

from __future__ import annotations

import math
import re

BYTES_PER_UNIT = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_bytes(text: str) -> int:
    """Bytes of a size such as "2GiB", "1.5 GiB", "500 MB" or "1024", rounded to whole bytes.

    KiB, MiB, GiB, TiB count in powers of 1024; KB, MB, GB, TB in powers of 1000; a bare number is in bytes.
    Case does not matter, nor do spaces or underscores.

    Raises:
        ValueError: the text is no such size.
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)([A-Z]*)", re.sub(r"[\s_]", "", text).upper())
    unit = match and (match[2] or "B")
    if match is None or unit not in BYTES_PER_UNIT:
        raise ValueError(
            f"{text!r} is no size in bytes. Write a number and one of B, KB, MB, GB, TB (powers of 1000) "
            'or KiB, MiB, GiB, TiB (powers of 1024), such as "2GiB" or "500 MB"'
        )
    return round(float(match[1]) * BYTES_PER_UNIT[unit]) if "." in match[1] else int(match[1]) * BYTES_PER_UNIT[unit]


def format_bytes(size_bytes: float) -> str:
    """Size to three or four digits in the largest power of 1024 that leaves it ≥ 1: "1.50 GiB", "512 B"."""
    if abs(size_bytes) < 1024:
        return f"{size_bytes:.0f} B"
    units = ("KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log2(abs(size_bytes))) // 10, len(units))
    size = size_bytes / 1024**power
    return f"{size:.{digits_after_point(size)}f} {units[power - 1]}"


def format_ms(time_ms: float) -> str:
    """Time in µs, ms, s or min, to about three digits: "350 µs", "12.3 ms", "1.50 s", "2.5 min"."""
    if abs(time_ms) < 1:
        return f"{time_ms * 1000:.0f} µs"
    if abs(time_ms) < 1000:
        return f"{time_ms:.{digits_after_point(time_ms)}f} ms"
    seconds = time_ms / 1000
    if abs(seconds) < 120:
        return f"{seconds:.{digits_after_point(seconds)}f} s"
    return f"{seconds / 60:.1f} min"


def digits_after_point(value: float) -> int:
    """As many as give a number ≥ 1 three digits in all."""
    if abs(value) < 10:
        return 2
    return 1 if abs(value) < 100 else 0
