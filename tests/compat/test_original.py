"""The tests of fast-transformers itself, run on lintra in its place.

They are not part of this project: LINTRA_FAST_TRANSFORMERS names a checkout of
https://github.com/idiap/fast-transformers, which need not be compiled or installed.
"""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

CHECKOUT = os.environ.get("LINTRA_FAST_TRANSFORMERS", "")
# Its test files for what is covered here and runs on a CPU. The others test private kernels or need CUDA.
FILES = (
    "attention/test_aft_attention.py",
    "attention/test_attention_layer.py",
    "attention/test_causal_linear_attention.py",
    "attention/test_clustered_transformer.py",
    "attention/test_full_attention.py",
    "attention/test_linear_attention.py",
    "attention/test_local_attention.py",
    "events/test_event_dispatcher.py",
    "events/test_event_filters.py",
    "events/test_events.py",
    "feature_maps/test_fourier_features.py",
    "recurrent/attention/cross_attention/test_attention_layer.py",
    "recurrent/attention/cross_attention/test_full_attention.py",
    "recurrent/attention/cross_attention/test_linear_attention.py",
    "recurrent/attention/self_attention/test_attention_layer.py",
    "recurrent/attention/self_attention/test_full_attention.py",
    "recurrent/attention/self_attention/test_linear_attention.py",
    "recurrent/test_transformer_decoder.py",
    "recurrent/test_transformer_encoder.py",
    "test_builders.py",
    "test_masking.py",
    "test_transformer_decoder.py",
    "test_transformer_encoder.py",
    "test_weight_mapper.py",
)
RUN = """
import sys
from pathlib import Path
import pytest
from lintra.compat.fast_transformers import install

install()
code = pytest.main(sys.argv[2:])
theirs = Path(sys.argv[1], "fast_transformers").resolve()
files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
used = [file for file in files if file and theirs in Path(file).resolve().parents]
if used:
    print("the library itself was imported:", used)
sys.exit(70 if used else code)
"""


def outcomes(file: str, report: Path) -> dict[str, tuple[str, str]]:
    """For each test in one of its files: passed, failed or skipped, and the message."""
    options = ("-q", "-p", "no:cacheprovider", "--rootdir", CHECKOUT, f"--junitxml={report}")
    done = subprocess.run(
        [sys.executable, "-c", RUN, CHECKOUT, *options, f"tests/{file}"],
        capture_output=True,
        text=True,
        cwd=CHECKOUT,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {"failure": "failed", "error": "failed", "skipped": "skipped"}
        said = next((one for one in case if one.tag in kinds), None)
        outcome = ("passed", "") if said is None else (kinds[said.tag], f"{said.get('message')}\n{said.text}")
        found[str(case.get("name"))] = outcome
    return found


@pytest.mark.slow
@pytest.mark.skipif(not CHECKOUT, reason="LINTRA_FAST_TRANSFORMERS names no checkout of fast-transformers")
@pytest.mark.parametrize("file", FILES)
def test_their_tests_pass(file, tmp_path):
    found = outcomes(file, tmp_path / "report.xml")
    assert any(outcome != "skipped" for outcome, _ in found.values()), "nothing ran"
    for name, (outcome, message) in found.items():
        assert outcome != "failed", f"{name}: {message}"
