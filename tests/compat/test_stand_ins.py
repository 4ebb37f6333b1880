"""Programs find the kernels of lintra under the names of other packages; each runs in its own process."""

import importlib.util
import json
import py_compile
import subprocess
import sys
import zipfile

import pytest

import lintra.compat
from lintra.compat import stand_ins
from lintra.compat.__main__ import __doc__ as usage

slow = pytest.mark.slow
HAS_FLA = importlib.util.find_spec("fla") is not None
TINY = """
import torch, transformers
config = transformers.Mamba2Config(
    vocab_size=64, hidden_size=32, num_hidden_layers=1, num_heads=8, head_dim=8, n_groups=2, state_size=16,
    pad_token_id=None, bos_token_id=None, eos_token_id=None
)
model = transformers.AutoModelForCausalLM.from_config(config).eval()
"""
HYBRID = """
import torch, transformers
config = transformers.Qwen3_5TextConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=8, linear_value_head_dim=16, eos_token_id=None,
    layer_types=["linear_attention", "full_attention"]
)
model = transformers.Qwen3_5ForCausalLM(config).eval()
"""


def run(program: str, *flags: str, path=None) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "ignore:Triton is not supported", *flags, "-c", program],
        capture_output=True,
        text=True,
        cwd=path,
    )


def printed(program: str) -> str:
    """The output of a new interpreter."""
    done = run(program)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_is_found_under_its_name_there():
    program = """
import sys
sys.modules.pop("fla", None)
import importlib.util
real = importlib.util.find_spec
import lintra.compat.stand_ins as stand_ins
stand_ins.find_spec = lambda name: None  # as where none of them is installed
import lintra.compat
print(set(lintra.compat.install().values()) | set(lintra.compat.install().values()))
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops import chunk_gla
from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
from causal_conv1d import causal_conv1d_fn
import fla.ops.kda, mamba_ssm
from fla.modules.norm.layernorm import RMSNorm
from fla.modules.layernorm import RMSNorm as before
from fla.modules.causal_conv1d import ShortConvolution
from fla.modules.convolution import causal_conv1d
from fla.ops.simple_gla.chunk import chunk_simple_gla
import fla.modules.l2norm as l2
assert RMSNorm is before and l2.l2norm.__module__.startswith("lintra.")
print(chunk_gated_delta_rule.__module__, mamba_chunk_scan_combined.__module__, causal_conv1d_fn.__module__)
try:
    import mamba_ssm.models
except ModuleNotFoundError as error:
    print(error)
lintra.compat.uninstall()
print([name for name in sys.modules if name.partition(".")[0] in ("fla", "mamba_ssm", "causal_conv1d")])
"""
    first, modules, missing, left = printed(program).splitlines()
    assert first == "{'stand-in'}"
    assert all(name.startswith("lintra.compat.") for name in modules.split())
    assert missing == "No module named 'mamba_ssm.models'"
    assert left == "[]"


@pytest.mark.parametrize("model", [pytest.param(TINY, marks=slow), HYBRID], ids=["mamba2", "qwen3_5"])
def test_a_model_imported_afterwards_runs_on_our_kernels(model):
    program = f"""
import lintra.compat
lintra.compat.install()
{model}
from lintra.compat import kernels
import sys
print(list(kernels.slow(sys.modules[type(model).__module__])))
tokens = torch.randint(64, (2, 9))
written = model.generate(tokens, max_new_tokens=5, do_sample=False)
from benchmarks.families import fallbacks
with fallbacks(model):
    print(torch.equal(model.generate(tokens, max_new_tokens=5, do_sample=False), written))
"""
    assert printed(program).splitlines() == ["[]", "True"]


def test_a_model_imported_before_is_named():
    program = f"""
{TINY}
import warnings, lintra.compat
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    lintra.compat.install("mamba_ssm")
print([str(x.message) for x in caught if "lintra" in str(x.message)])
"""
    said = printed(program)
    assert "transformers.models.mamba2.modeling_mamba2 was imported before" in said
    assert "lintra.accelerate(model)" in said


def test_a_package_that_cannot_run_here_and_is_imported_is_refused():
    program = """
import sys, types
sys.modules["mamba_ssm"] = types.ModuleType("mamba_ssm")
sys.modules["mamba_ssm"].__file__ = "/there/mamba_ssm.py"
import torch
torch.cuda.is_available = lambda: False
import lintra.compat
lintra.compat.install("mamba_ssm")
"""
    done = run(program)
    assert done.returncode == 1
    assert "must come before whatever imports it" in done.stderr


@pytest.mark.slow
def test_transformers_stays_itself():
    """lintra.compat.transformers only works with transformers; it does not stand in for it."""
    program = """
import lintra.compat
print(*lintra.compat.install())
import transformers, lintra.hf
print(transformers.__name__, lintra.hf.register_attention.__module__)
lintra.compat.uninstall()
assert sys.modules["transformers"] is transformers
"""
    first, second = printed("import sys" + program).splitlines()
    assert first == "fla mamba_ssm causal_conv1d"
    assert second == "transformers lintra.compat.transformers.attention"


def test_fla_finds_the_other_packages_when_it_is_wrapped(monkeypatch):
    order = []
    monkeypatch.setattr(stand_ins, "_install", lambda package: order.append(package) or "left")
    assert list(stand_ins.install()) == ["fla", "mamba_ssm", "causal_conv1d"]
    assert order == ["mamba_ssm", "causal_conv1d", "fla"]


def test_a_folder_of_the_name_of_a_package_is_none(tmp_path, monkeypatch):
    (tmp_path / "no_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not stand_ins._is_installed("no_package")
    (tmp_path / "no_package" / "__init__.py").touch()
    importlib.invalidate_caches()
    assert stand_ins._is_installed("no_package")


def test_another_package_is_refused():
    with pytest.raises(ValueError, match="packages must be of fla, mamba_ssm, causal_conv1d; got flash_attn"):
        lintra.compat.install("flash_attn")


@pytest.mark.slow
@pytest.mark.skipif(not HAS_FLA, reason="fla-core is not installed")
def test_with_fla_installed_a_model_generates_on_a_cpu():
    """By itself, transformers takes the Triton kernels of FLA, which raise an error without a GPU."""
    program = f"""
{HYBRID}
model.generate(torch.randint(64, (1, 9)), max_new_tokens=2)
"""
    assert "0 active drivers" in run(program).stderr
    program = f"""
import lintra.compat
print(lintra.compat.install()["fla"])
{HYBRID}
print(model.generate(torch.randint(64, (1, 9)), max_new_tokens=2).shape)
"""
    assert printed(program).splitlines() == ["wrapped", "torch.Size([1, 11])"]


@pytest.mark.parametrize("program", [pytest.param("program.py", marks=slow), "-m program"])
def test_a_program_is_run_as_it_is(program, tmp_path):
    (tmp_path / "helper.py").write_text("word = 'beside'\n")
    (tmp_path / "program.py").write_text("""
import sys
from helper import word
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
print(__name__, sys.argv, word, selective_scan_fn.__module__)
sys.exit(3)
""")
    done = subprocess.run(
        [sys.executable, "-m", "lintra.compat", *program.split(), "--lr", "1"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 3, done.stderr
    name, *_, module = done.stdout.split()
    assert (name, module) == ("__main__", "lintra.compat.mamba_ssm.ops.selective_scan_interface")
    assert "'--lr', '1'] beside" in done.stdout


@pytest.mark.slow
def test_a_program_finds_what_is_beside_it_and_not_what_is_where_it_is_called(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "elsewhere.py").touch()
    (tmp_path / "folder" / "beside.py").touch()
    (tmp_path / "folder" / "program.py").write_text("import beside\nimport elsewhere\n")
    command = [sys.executable, "-m", "lintra.compat", "folder/program.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr.endswith("No module named 'elsewhere'\n")


CLASSES = """
import atexit, pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
import torch.utils.data
from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

class Point:
    def __init__(self, x):
        self.x = x

class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, i):
        return Point(i)

def copied(point, *where):
    return pickle.loads(pickle.dumps(point))

def in_a_process(point):
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(copied, point).result()

if __name__ == "__main__":
    atexit.register(lambda: print("at exit", copied(Point(1)).x))
    print("here", copied(Point(2)).x)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        print("in a process of a process", pool.submit(in_a_process, Point(3)).result().x)
    loader = torch.utils.data.DataLoader(
        Points(), batch_size=None, num_workers=1, multiprocessing_context=METHOD
    )
    print("from a worker", [type(x) is Point for x in loader])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("program", "method"), [("program.py", "forkserver"), ("-m program", "fork")])
def test_a_program_pickles_its_own_classes(program, method, tmp_path):
    """While it runs, at exit, and between processes, which import it and, with it, the stand-ins."""
    (tmp_path / "program.py").write_text(CLASSES.replace("METHOD", repr(method)))
    command = [sys.executable, "-W", "ignore", "-m", "lintra.compat", *program.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.stdout.splitlines() == [
        "here 2",
        "in a process of a process 3",
        "from a worker [True, True]",
        "at exit 1",
    ], done.stderr


@pytest.mark.parametrize(
    "form",
    ["file", *(pytest.param(x, marks=slow) for x in ("module", "compiled", "folder", "archive", "package"))],
)
def test_a_program_of_any_form_sees_what_python_shows_it(form, tmp_path):
    """Its name, arguments, file, package, specification and first import path."""
    code = """
import sys
print([__name__, sys.argv, __file__, __package__, __spec__ and __spec__.name, sys.path[0]])
print(sys.modules["__main__"].__dict__ is globals())
"""
    name = {"folder": "app/__main__.py", "package": "app/__main__.py"}.get(form, "app.py")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(code)
    if form == "compiled":
        py_compile.compile(str(tmp_path / name), str(tmp_path / "app.pyc"))
        name = "app.pyc"
    elif form == "archive":
        with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
            archive.write(tmp_path / name, "__main__.py")
        name = "app.zip"
    call = {"folder": ["app"], "module": ["-m", "app"], "package": ["-m", "app"]}.get(form, [name])
    found = [
        subprocess.run([sys.executable, *run, *call, "3"], capture_output=True, text=True, cwd=tmp_path)
        for run in ([], ["-m", "lintra.compat"])
    ]
    assert found[1].stdout == found[0].stdout, found[1].stderr
    assert found[1].stdout.endswith("True\n")
    if form == "file":
        assert not (tmp_path / "__pycache__").exists()


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ([], 2),
        (["--help"], 0),
        (["nothing.py"], 2),
        pytest.param(["."], 2, marks=slow),
        *(
            pytest.param(["-m", x], 2, marks=slow)
            for x in ("nothing", "nothing.inside", "json.tool.nothing", ".nothing")
        ),
    ],
)
def test_calls_without_a_program(args, code, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "lintra.compat", *args], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == code
    if args == ["nothing.py"]:
        assert done.stderr == "lintra.compat: there is no program nothing.py\n"
    elif "." in args or "-m" in args:
        assert done.stderr == f"lintra.compat: there is no module {args[-1]}, or no __main__ in it\n"
    else:
        assert usage.strip() in done.stdout + done.stderr


def test_the_list_of_families_is_that_of_the_report():
    done = subprocess.run(
        [sys.executable, "-m", "lintra.cli", "list", "--families", "--json"], capture_output=True, text=True
    )
    report = json.loads(done.stdout)
    assert len(report["families"]) >= 18
    assert all(each["passed"] for each in report["families"].values())
    assert {"transformers", "torch", "lintra"} <= set(report["versions"])
