import platform
import subprocess
import sys

import pytest

from lintra.allocator import keep_freed_memory, release_freed_memory

GNU = platform.libc_ver()[0] == "glibc"
HELD = """
import re, torch
from lintra.allocator import keep_freed_memory, release_freed_memory
{}
def held():
    return 1024 * int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = held()
x = torch.ones(2**24)
del x
{}
print(held() - before)
"""


@pytest.mark.skipif(not GNU, reason="needs the GNU C library")
@pytest.mark.parametrize(
    ("first", "then", "kept"),
    [
        ("", "", False),
        ("assert keep_freed_memory()", "", True),
        ("assert keep_freed_memory()", "assert release_freed_memory()", False),
    ],
)
def test_64_mb_that_were_freed(first, then, kept):
    done = subprocess.run(
        [sys.executable, "-c", HELD.format(first, then)], check=True, capture_output=True, text=True
    )
    assert (int(done.stdout) > 2**25) == kept


def test_another_c_library(monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not keep_freed_memory()
    assert not release_freed_memory()
