"""Formats that libsndfile does not read (m4a, wma, video): decoded by an ffmpeg program, if there is one."""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import IO

from lintra.audio import piped
from lintra.audio.errors import SpeechError
from lintra.audio.samples import Audio

_WHERE = re.compile(r"\[\S+ @ \w+\] ")  # the part of ffmpeg that reports, and its address


def pieces(path: Path, *, seconds: float, refused: str) -> Generator[Audio, None, None]:
    """The first audio track of a file, in pieces of about so many seconds; channels are averaged.

    refused: why libsndfile does not read it. Raises SpeechError with that, and what to install or what ffmpeg
    says, some of it only when the pieces before are out.
    """
    program = shutil.which("ffmpeg")
    if program is None:
        raise SpeechError(
            f"{path} cannot be read as audio: {refused} (install ffmpeg to hear formats such as m4a)"
        )
    with tempfile.TemporaryFile() as errors, _started(program, path, errors) as process:
        assert process.stdout is not None
        output, ended = process.stdout, False

        def read(n: int) -> bytes:
            nonlocal ended
            content = output.read(n)
            ended = ended or not content
            return content

        try:
            failure = None
            try:
                yield from piped.pieces(read, seconds=seconds, name=str(path))
            except SpeechError as error:
                failure = error
            if (failure is None or ended) and process.wait():
                errors.seek(0)
                reason = _reason(errors.read().decode(errors="replace"))
                raise SpeechError(f"{path} cannot be read as audio: {refused}; ffmpeg: {reason}") from failure
            if failure is not None:
                raise failure
        finally:
            process.kill()


def _started(program: str, path: Path, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start ffmpeg, which writes WAV to a pipe. It opens no network address, whatever the file refers to; it
    takes the name as a file, whatever it is; and Ctrl-C reaches this program alone."""
    reads = ["-protocol_whitelist", "file", "-i", f"file:{path.absolute()}"]
    writes = ["-map", "0:a:0", "-c:a", "pcm_f32le", "-f", "wav", "pipe:1"]
    return subprocess.Popen(
        [program, "-nostdin", "-hide_banner", "-v", "error", "-xerror", *reads, *writes],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        start_new_session=True,
    )


def _reason(printed: str) -> str:
    """Return the first of the lines ffmpeg printed, which is the most precise."""
    lines = [line for line in printed.splitlines() if line.strip()]
    return _WHERE.sub("", lines[0]).strip() if lines else "it says nothing"
