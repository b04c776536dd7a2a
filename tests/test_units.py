"""Sizes and times are read and written as documented."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rockmate.units import format_apart, format_bytes, format_ms, parse_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("2GiB", 2 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("8GB", 8 * 10**9),
        ("500MB", 500 * 10**6),
        (" 64 kib ", 64 * 1024),
        ("1_000", 1000),
        ("17 B", 17),
        (".5KB", 500),
        ("1 TiB", 2**40),
        ("0", 0),
        ("2G", 2 * 10**9),
        ("512M", 512 * 10**6),
        ("1.5 Gi", 3 * 2**29),
        ("1e9", 10**9),
        ("1.5E3", 1500),
        ("2_000_000_000", 2 * 10**9),
        ("9007199254740993.0", 9007199254740993),
    ],
)
def test_parse_bytes_reads_usual_forms(text, size_bytes):
    parsed = parse_bytes(text)
    assert parsed == size_bytes
    assert isinstance(parsed, int)


@pytest.mark.parametrize("text", ["", "GiB", "G", "-1GB", "2 GiBs", "1e", "1e-3", "1e9999", "1.2.3 MB", "50%", "٣"])
def test_parse_bytes_refuses_what_is_unclear(text):
    with pytest.raises(ValueError, match=r"is no size in bytes\. Write a number and one of B, KB"):
        parse_bytes(text)


@given(st.integers(min_value=0, max_value=2**60))
def test_parse_bytes_is_exact_on_whole_numbers(size_bytes):
    assert parse_bytes(str(size_bytes)) == size_bytes
    assert parse_bytes(f"{size_bytes} MiB") == size_bytes * 2**20


@given(st.integers(min_value=0, max_value=2**49))
def test_format_bytes_is_read_back_to_three_digits(size_bytes):
    assert parse_bytes(format_bytes(size_bytes)) == pytest.approx(size_bytes, rel=0.005)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (600 * 2**20, "600 MiB"), (3 * 2**29, "1.50 GiB")],
)
def test_format_bytes(size_bytes, text):
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("time_ms", "text"),
    [(0.35, "350 µs"), (12.34, "12.3 ms"), (999.0, "999 ms"), (1500.0, "1.50 s"), (150_000.0, "2.5 min")],
)
def test_format_ms(time_ms, text):
    assert format_ms(time_ms) == text


def test_sizes_that_differ_are_told_apart():
    assert format_apart(3 << 20, 4 << 20) == ("3.00 MiB", "4.00 MiB")
    assert format_apart(3 << 20, 3 << 20) == ("3.00 MiB", "3.00 MiB")
    assert format_apart(3 << 20, (3 << 20) + 1) == ("3145728 bytes", "3145729 bytes")
