import pytest

from ditto_core.errors import UsageError
from ditto_core.system.sizes import format_age, format_size, parse_age, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("10GB", 10_000_000_000), ("1.5 MiB", 1_572_864), ("7", 7), ("2kb", 2000), (" 3 B ", 3), ("1TiB", 2**40)],
)
def test_sizes_are_bytes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"), [("30d", 2_592_000), ("12h", 43_200), ("1.5m", 90), ("2W", 1_209_600), ("5 s", 5)]
)
def test_ages_are_seconds(text, seconds):
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "10XB", "1e3", "ten"])
def test_a_size_that_cannot_be_read_is_one_clear_line(text):
    with pytest.raises(UsageError, match=r"cannot read the size .*, expected a number and B, KB"):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "30", "d", "3y", "-1d"])
def test_an_age_that_cannot_be_read_is_one_clear_line(text):
    with pytest.raises(UsageError, match=r"cannot read the time .*as in 30d"):
        parse_age(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (538_000_000, "538 MB"), (99_949_999, "99.9 MB"), (2e15, "2000 TB")],
)
def test_sizes_read_well(size, text):
    assert format_size(size) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0 s"), (-3, "0 s"), (59, "59 s"), (3600, "1 h"), (259_200, "3 d")])
def test_ages_read_well(seconds, text):
    assert format_age(seconds) == text
