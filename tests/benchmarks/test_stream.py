"""Memory that does not grow with the text."""

from dataclasses import replace

import pytest

from benchmarks import stream


def test_a_text_of_a_size(tmp_path):
    for size in (10, 5_000, 3_000_000):
        stream.write_text(tmp_path / "text.txt", size)
        assert (tmp_path / "text.txt").stat().st_size == size
        assert ((tmp_path / "text.txt").read_bytes().count(b"\nCopy ") > 1) == (size == 3_000_000)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text():
    """From 1 to 64 MB of text it grows by at most 16 MB, in preparation and in training."""
    sizes = replace(stream.QUICK, small=1_000_000, large=64_000_000, steps=20)
    rows, _ = stream.run(sizes, lambda done: None)
    growth = {row.what: row.figure for row in rows if "growth" in row.what}
    assert len(growth) == 2
    assert all(figure < 16 for figure in growth.values()), growth
