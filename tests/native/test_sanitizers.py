"""The kernels under the address and undefined-behaviour sanitizers, over a grid of shapes."""

import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "lintra" / "native"
COMPILER = shutil.which("g++")
SANITIZE = ["-g1", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
FLAGS = ["-std=c++17", "-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-fno-trapping-math"]
AVX2 = ["-mavx2", "-mfma"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
INSTRUCTION_SETS = {
    "x86_64": {"baseline": [], "avx2": AVX2, "avx512": AVX512},
    "aarch64": {"neon": []},
}


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no g++")
def test_no_call_leaves_its_memory(tmp_path):
    builds = INSTRUCTION_SETS.get(platform.machine(), {"baseline": []})
    jobs = [(NATIVE / "library.cpp", []), (ROOT / "tests" / "native" / "grid.cpp", ["-fexceptions"])]
    for name, options in builds.items():
        sources = [file for file in sorted(NATIVE.glob("*.cpp")) if file.name != "library.cpp"]
        jobs += [(source, [f"-DLINTRA_ISA={name}", *options]) for source in sources]
    objects = [tmp_path / f"{i}.o" for i in range(len(jobs))]

    def build(i):
        source, options = jobs[i]
        subprocess.run([COMPILER, *FLAGS, *SANITIZE, *options, "-c", source, "-o", objects[i]], check=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(build, range(len(jobs))))
    program = tmp_path / "grid"
    subprocess.run([COMPILER, *SANITIZE, *objects, "-o", program, "-lpthread"], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    assert int(done.stdout) > 5_000
