"""Peak memory, measured in a process of its own."""

import contextlib
import re
import signal
import subprocess
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_OUT_OF_MEMORY = re.compile(
    r"MemoryError|bad_alloc|can't allocate memory|cannot allocate memory|not enough memory|out of memory",
    re.IGNORECASE,
)


def peak() -> int:
    """The most bytes this process has held so far, or since `forget_peak`."""
    if _STATUS.exists():  # getrusage would count what the parent process held at the fork
        return _status("VmHWM")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def anonymous() -> int:
    """The bytes that this process holds now and that are not backed by a file; where the system does not say,
    its peak."""
    return _status("RssAnon") if _STATUS.exists() else peak()


def forget_peak() -> None:
    """Have `peak` count from what this process holds now, where the system can do that. proc(5)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def grow_at_most(size: int) -> None:
    """Refuse more than `size` further bytes to this process, where the system can do that."""
    if _STATUS.exists():
        import resource

        most = _status("VmSize") + size
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def ran_out(error: Exception) -> bool:
    """Return whether an error says that memory could not be allocated."""
    return bool(_OUT_OF_MEMORY.search(f"{type(error).__name__}: {error}"))


def printed_by(program: str) -> str:
    """The last line that a Python program prints in a process of its own, in which `peak` is imported.

    Raises MemoryError where it ran out of memory or was killed for it, else RuntimeError if it failed."""
    begin = "from lintra.bench.memory import forget_peak, grow_at_most, peak\n"
    done = subprocess.run([sys.executable, "-c", begin + program], capture_output=True, text=True)
    if done.returncode == 0:
        return done.stdout.splitlines()[-1]
    said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    if done.returncode == -signal.SIGKILL or _OUT_OF_MEMORY.search(done.stderr):
        raise MemoryError(said)
    raise RuntimeError(said)


def peak_of(program: str) -> int:
    """The number of bytes that a Python program prints, in which `peak()` is the most it has held so far."""
    return int(printed_by(program))


def _status(name: str) -> int:
    return 1024 * int(_field(_STATUS.read_text(), name))


def _field(text: str, name: str) -> str:
    found = re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)
    if found is None:
        raise OSError(f"the system does not say {name}")
    return found[1]
