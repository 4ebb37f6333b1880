"""`lintra export --to runtime|onnx|safetensors --model DIR`."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lintra import checkpoint, train
from lintra.cli.arguments import UsageError, parse
from lintra.export import onnx, runtime
from lintra.export.runtime import Weights
from lintra.io.files import Error, refuse_folder, write_atomically


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Write a trained model in the format of another program."""

    # a file for the C runtime (docs/format.md); ONNX graphs (docs/export.md); a folder of its own
    to: Literal["runtime", "onnx", "safetensors"]
    model: Path = Path("mnist-small")  # folder of a run or checkpoint, or a bundled model
    weights: Weights = "float32"  # their format; fewer bits are read faster
    opset: onnx.Opset = 20  # of ONNX; 27 has an operator for a recurrence
    domain: onnx.Domain = "ai.onnx"  # whose operator; com.microsoft: that of onnxruntime, with any opset
    out: Path | None = None  # the file; else the model's name with .lrt, -step.onnx and the like, or -model

    def __post_init__(self):
        if self.to != "runtime" and self.weights != "float32":
            form = "ONNX" if self.to == "onnx" else "safetensors"
            raise ValueError(f"weights must be float32 in {form}, got {self.weights}")
        for name in ("opset", "domain"):
            if self.to != "onnx" and getattr(self, name) != getattr(Options, name):
                raise ValueError(f"{name} is for ONNX, got {getattr(self, name)} with to={self.to}")
        if self.to != "safetensors":
            refuse_folder("out", self.out)


def export_command(args: Sequence[str]) -> int:
    options = parse(Options, args, prog="lintra export", description=Options.__doc__ or "")
    model = checkpoint.load(options.model)
    tokenizer = _tokenizer(options)
    place = None if tokenizer is None else _place(options, "-tokenizer.json", tokenizer)
    {"runtime": _runtime, "onnx": _onnx, "safetensors": _safetensors}[options.to](model, options)
    if tokenizer is not None and place is not None:
        write_atomically(place, lambda temporary: temporary.write_bytes(tokenizer))
        print(f"{place}: the tokenizer")
    return 0


def _runtime(model: Any, options: Options) -> None:
    out = _place(options, ".lrt")
    runtime.write(model, out, options.weights)
    print(f"{out}: {_size(out)}, weights in {options.weights}")


def _onnx(model: Any, options: Options) -> None:
    """Write every form that the model has, and a description; report the forms that it lacks. Graphs are in
    float32, whatever the model is in."""
    model = model.float()
    forms = onnx.forms(model)
    target: dict[str, Any] = {"opset": options.opset, "domain": options.domain}
    reasons = {form: onnx.why_not(model, form, **target) for form in forms[1:]}  # of the first, write raises
    # All places are known before anything is written.
    places: dict[onnx.Form, Path] = {
        form: _place(options, f"-{form}.onnx") for form in forms if reasons.get(form) is None
    }
    description = _place(options, "-onnx.json")
    contrib = " and com.microsoft" if options.domain == "com.microsoft" else ""
    for form, out in places.items():
        onnx.write(model, out, form, **target)
        print(f"{out}: {_size(out)}, opset {options.opset}{contrib}")
    onnx.write_description(model, description, places, **target)
    print(f"{description}: inputs, outputs, first states, symbols")
    for form, reason in reasons.items():
        if reason is not None:
            print(f"no {form} form: {reason}")


def _safetensors(model: Any, options: Options) -> None:
    """Write the model as a folder of its own, without training state and not in shards."""
    out = _place(options, "-model")
    checkpoint.save(model, out)
    parts = [x for x in sorted(out.iterdir()) if x.suffix == ".safetensors"]
    print(f"{out}: {', '.join(f'{x.name} {_size(x)}' for x in parts)}")


def _tokenizer(options: Options) -> bytes | None:
    """Return the tokenizer of the run, if any, to write beside the export, in which symbols are numbers."""
    try:
        run = train.Run.of(options.model)
    except Error as error:  # the export is complete without it
        print(f"lintra: no tokenizer beside it: {error}", file=sys.stderr)
        return None
    file = getattr(run and run.task, "tokenizer", None)
    return None if file is None else Path(file).read_bytes()


def _place(options: Options, ending: str, content: bytes | None = None) -> Path:
    """Return the file to write. Raises UsageError if its default name is taken or, given the `content` of a
    tokenizer, if any is, unless by the same."""
    if options.out is not None:
        name = options.out.name.removesuffix(".onnx").removesuffix(".lrt")
        out = options.out if ending in (".lrt", "-model") else options.out.with_name(name + ending)
        if content is not None and _is_other(out, content):
            raise UsageError(f"{out} exists, where the tokenizer goes: move it, or say another --out")
        return out
    out = Path(f"{options.model.resolve().name}{ending}")
    if out.exists() if content is None else _is_other(out, content):
        endings = {"onnx": ".onnx", "runtime": ".lrt", "safetensors": "-model"}
        name = out.name.removesuffix(ending) + endings[options.to]
        raise UsageError(f"{out} exists: say --out {name} to replace it")
    return out


def _is_other(file: Path, content: bytes) -> bool:
    return file.exists() and not (file.is_file() and file.read_bytes() == content)


def _size(file: Path) -> str:
    return f"{file.stat().st_size / 2**20:.2f} MiB"
