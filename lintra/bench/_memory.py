"""Peak memory, measured in a process of its own."""

import subprocess
import sys

_PEAK = """
def peak():
    import os, re, resource
    if os.path.exists("/proc/self/status"):  # getrusage would count what the parent process held at the fork
        return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

"""


def peak_of(program: str) -> int:
    """The number of bytes that a Python program prints, in which `peak()` is the most it has held so far."""
    done = subprocess.run([sys.executable, "-c", _PEAK + program], check=True, capture_output=True, text=True)
    return int(done.stdout)
