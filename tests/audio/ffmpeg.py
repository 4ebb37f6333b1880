"""ffmpeg for tests: the real program where it is installed, and a stand-in that does as it is told."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

# It records its arguments and reads the file; then comes the code that a test adds.
_STAND_IN = """#!{python}
import json, struct, sys
arguments = sys.argv[1:]
with open({log!r}, "w") as log:
    json.dump(arguments, log)
file = arguments[arguments.index("-i") + 1].removeprefix("file:")
content = open(file, "rb").read()

def header(rate, channels, length=0xFFFFFFFF):
    form = struct.pack("<HHIIHH", 3, channels, rate, 4 * channels * rate, 4 * channels, 32)
    extra = b"LIST" + struct.pack("<I", 5) + b"INFOx\\0"
    begin = b"RIFF" + b"\\xff" * 4 + b"WAVEfmt " + struct.pack("<I", 16) + form
    return begin + extra + b"data" + struct.pack("<I", length)

out = sys.stdout.buffer
{body}
"""


def real_ffmpeg() -> str | None:
    """The program, on PATH or in the package imageio-ffmpeg."""
    if (program := shutil.which("ffmpeg")) or importlib.util.find_spec("imageio_ffmpeg") is None:
        return program
    from imageio_ffmpeg import get_ffmpeg_exe

    return get_ffmpeg_exe()


def only_on_path(monkeypatch, folder: Path, program: str | None) -> None:
    """Make `program` the only ffmpeg on PATH, or leave none there."""
    folder.mkdir(exist_ok=True)
    if program is not None:
        (folder / "ffmpeg").symlink_to(program)
    monkeypatch.setenv("PATH", str(folder))


def stand_in(monkeypatch, folder: Path, body: str) -> Path:
    """Put a program onto PATH that does what `body` says -> the file with its arguments, as JSON."""
    folder.mkdir(exist_ok=True)
    log, program = folder / "arguments.json", folder / "ffmpeg"
    program.write_text(_STAND_IN.format(python=sys.executable, log=str(log), body=body))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return log
