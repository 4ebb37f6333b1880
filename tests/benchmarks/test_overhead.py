"""How the overhead is counted."""

import pytest

from benchmarks import overhead
from benchmarks.checkout import ROOT


def test_private_names_are_free_to_the_package_that_owns_them_alone(tmp_path):
    for name in ("lintra/a/_b.py", "lintra/a/c.py", "lintra/d.py", "tests/e.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("from lintra.a import _b, c\nfrom lintra.a._b import x, y\nimport os\n")
    assert overhead.private_imports(tmp_path, "lintra") == ["lintra/d.py: lintra.a._b"] * 2
    assert len(overhead.private_imports(tmp_path, "tests")) == 2
    assert overhead.lines(tmp_path) == 9
    assert overhead.lines(tmp_path, "a") == 3


@pytest.mark.parametrize("part", overhead.FOLDERS)
def test_no_package_imports_what_is_private_to_another(part):
    assert overhead.private_imports(ROOT, part) == []


@pytest.mark.slow
def test_frames_and_calls_are_counted():
    rows, _ = overhead.run(overhead.QUICK, lambda done: None)
    figures = {row.what: row.figure for row in rows}
    assert figures["frames"] > figures["frames of ours"] > 1
    assert figures["calls a layer, no gradients"] > 1
