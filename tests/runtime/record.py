"""A record of fuzzing: python -m tests.runtime.record SECONDS FILE builds tests/runtime/fuzz.c with
sanitizers, runs its mutator for that long and writes the outcome as JSON."""

import sys
import tempfile
from pathlib import Path

from lintra import runtime
from lintra.bench import reports
from tests.runtime import corpus
from tests.runtime.test_program import AUDIO, HERE, SANITIZE, SOURCE, compiled, results, said


def record(seconds: int, file: Path) -> None:
    """Raise AssertionError with the report of the sanitizers."""
    with tempfile.TemporaryDirectory() as folder:
        program = compiled(
            Path(folder, "fuzz"), HERE / "fuzz.c", SOURCE, AUDIO, options=[*SANITIZE, "-DMUTATE"]
        )
        seeds = [*corpus.write(Path(folder, "corpus")), *sorted((HERE / "cases").iterdir())]
        found, inputs = results(said(program, seconds, seconds, *seeds))
    library = runtime._library()
    named = {library.lrt_error(code).decode(): times for code, times in sorted(found.items())}
    command = f"python -m tests.runtime.record {seconds} {file}"
    reports.save(file, command=command, inputs=inputs, calls_by_result=named, flags=SANITIZE)


if __name__ == "__main__":
    record(int(sys.argv[1]), Path(sys.argv[2]))
