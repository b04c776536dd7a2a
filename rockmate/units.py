"""Sizes and times as people write and read them."""

from __future__ import annotations

import math
import re
from fractions import Fraction

_DECIMAL = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
# "2G" is 2 GB and "2Gi" is 2 GiB: the letter i tells powers of 1024, in short forms as in long ones.
BYTES_PER_UNIT = {"B": 1} | {
    f"{unit}{byte}": size for unit, size in {**_DECIMAL, **_BINARY}.items() for byte in ("B", "")
}


def parse_bytes(text: str) -> int:
    """Bytes of a size such as "2GiB", "1.5 GiB", "500 MB", "2G", "1e9" or "1024", rounded to whole bytes.

    KiB, MiB, GiB, TiB (Ki, Mi, Gi, Ti) count in powers of 1024; KB, MB, GB, TB (K, M, G, T) in powers of 1000; a bare
    number is in bytes. Case does not matter, nor do spaces or underscores.

    Raises:
        ValueError: the text is no such size.
    """
    plain = re.sub(r"[\s_]", "", text).upper()
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)(E\+?\d{1,3})?([A-Z]*)", plain, re.ASCII)
    unit = match and (match[3] or "B")
    if match is None or unit not in BYTES_PER_UNIT:
        raise ValueError(
            f"{text!r} is no size in bytes. Write a number and one of B, KB, MB, GB, TB (powers of 1000) "
            'or KiB, MiB, GiB, TiB (powers of 1024), such as "2GiB" or "500 MB"'
        )
    return round(Fraction(match[1] + (match[2] or "")) * BYTES_PER_UNIT[unit])


def format_bytes(size_bytes: float) -> str:
    """Size to three or four digits in the largest power of 1024 that leaves it ≥ 1: "1.50 GiB", "512 B"."""
    if abs(size_bytes) < 1024:
        return f"{size_bytes:.0f} B"
    units = ("KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log2(abs(size_bytes))) // 10, len(units))
    size = size_bytes / 1024**power
    return f"{size:.{digits_after_point(size)}f} {units[power - 1]}"


def format_apart(*sizes_bytes: int) -> tuple[str, ...]:
    """Sizes that are compared: as `format_bytes` where that tells different ones apart, else in bytes."""
    texts = tuple(map(format_bytes, sizes_bytes))
    if len(set(texts)) == len(set(sizes_bytes)):
        return texts
    return tuple(f"{size_bytes} bytes" for size_bytes in sizes_bytes)


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
