"""The command line: parse, call, print.

`lintra list`, `lintra info` and every first page of help need nothing but the core; the other commands
import what they need when they are called.
"""

import contextlib
import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module

import lintra
from lintra.allocator import keep_freed_memory

# command -> (module, function, what it does)
COMMANDS = {
    "demo": ("demo", "demo_command", "train on real digits, draw some, measure: two minutes, with pictures"),
    "list": ("info", "list_mechanisms", "the attention mechanisms and what they can do (--json, --families)"),
    "info": ("info", "info", "versions, CPU, and which implementation serves each op here"),
    "prepare": (
        "prepare",
        "prepare_command",
        "learn a tokenizer, or write texts as shards of tokens, for lintra train text",
    ),
    "train": ("train", "train_command", "train a model on a task, or --resume a run"),
    "generate": ("generate", "generate_command", "draw or write with a trained model, as an RNN"),
    "predict": (
        "predict",
        "predict_command",
        "classify texts, forecast series, transcribe speech, as JSON",
    ),
    "transcribe": (
        "transcribe",
        "transcribe_command",
        "transcribe speech from files, a pipe or live (--stream)",
    ),
    "evaluate": ("evaluate", "evaluate_command", "score a trained model on its test set, with errors"),
    "export": ("export", "export_command", "write a trained model for the C runtime, ONNX or safetensors"),
    "web": ("web", "web_command", "a page that completes your drawing, or transcribes your speech"),
    "bench": ("bench", "bench", "measure speed and memory, and save the figures"),
    "completion": ("completion", "completion", "print a completion script for bash or zsh"),
}

_HELP = (
    f"""{str(lintra.__doc__).splitlines()[0]}

usage: lintra COMMAND [--flag value ...]

"""
    + "\n".join(f"  {name:<12}{purpose}" for name, (*_, purpose) in COMMANDS.items())
    + """

  lintra COMMAND --help    the flags of a command
  --version                the version
  --debug                  a traceback with every error
"""
)

# what PyTorch puts before the message of an error in a process that reads batches
_OF_WORKER = re.compile(r"^Caught \w+ in DataLoader worker process.*\n[\w.]+: (?=.)", re.DOTALL)
_NO_ROOM = re.compile(r"OutOfMemoryError|MemoryError|can't allocate memory|not enough memory", re.IGNORECASE)
_TRAIN = ("tyro", "rich", "lightning", "matplotlib", "pooch", "tensorboard", "yaml", "PIL")
# package -> the extra that installs it
_EXTRA = {
    **dict.fromkeys(_TRAIN, "train"),
    **dict.fromkeys(("kaldi_native_fbank", "soundfile", "soxr"), "speech"),
    **dict.fromkeys(("onnx", "onnxscript"), "onnx"),
    "sounddevice": "live",
    "tokenizers": "tokenizers",
    "wandb": "wandb",
}


def main(args: Sequence[str] | None = None) -> int:
    """Run one command -> the exit code, as of `run`."""
    return run(_any_command, args)


def _any_command(args: Sequence[str]) -> int:
    if args[:1] == ["help"] and len(args) > 1:
        args = [*args[1:], "--help"]
    if not args or args[0] in ("-h", "--help", "help"):
        print(_HELP, end="")
    elif args[0] == "--version":
        print(f"lintra {lintra.__version__}")
    else:
        return command(args[0])(args[1:])
    return 0


def run(
    command: Callable[[Sequence[str]], int], args: Sequence[str] | None = None, name: str = "lintra"
) -> int:
    """Run a function of the arguments; of an error, one line after `name` is printed -> the exit code: 0; 1
    diverged, or a file or an utterance failed; 2 wrong input or no room; 130, 141 and 143 stopped, by Ctrl-C,
    by a reader who had enough, and by SIGTERM.

    args: without them, those of the process. --debug among them prints a traceback too; `command` does not
    get it.
    """
    args = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in args
    args = [arg for arg in args if arg != "--debug"]
    keep_freed_memory()
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # a character that its encoding lacks must not lose a result
    try:
        code = command(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader had enough; nothing may be left for the interpreter to flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as of a program that SIGPIPE ends: what was still to be done may have failed
    except Exception as error:
        if debug:
            traceback.print_exc()
        if _should_report(error):
            with contextlib.suppress(OSError):  # its terminal may be gone
                print(f"{name}: {_one_line(error)}", file=sys.stderr)
        return getattr(error, "exit_code", 2)


def _should_report(error: Exception) -> bool:
    """Return whether this process prints an error. Rank 0 alone prints errors that all ranks share; every
    remaining rank prints a lost connection."""
    if not hasattr(error, "exit_code") or isinstance(error, ConnectionError):
        return True
    from lintra.train.launch import is_first_process

    return is_first_process()


def _open_closed_streams() -> None:
    """Give the process an empty standard input and outputs that go nowhere, where they were closed when it
    started."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (for as long as the process is)


def command(name: str) -> Callable[[Sequence[str]], int]:
    """Return the function of a command. Raises ValueError for an unknown name."""
    if name not in COMMANDS:
        raise ValueError(f"there is no command {name!r}; the commands are {', '.join(COMMANDS)}")
    module, function, _ = COMMANDS[name]
    return getattr(import_module(f"lintra.cli.{module}"), function)


def _one_line(error: Exception) -> str:
    """Describe an error in words. One that is not the user's fault names its type and how to see more."""
    message = " ".join(_OF_WORKER.sub("", str(error)).split())
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package in _EXTRA:
        return (
            f"this command needs {package}, which is not installed: pip install 'lintra[{_EXTRA[package]}]'"
        )
    if isinstance(error, (ValueError, OSError)) or hasattr(error, "exit_code"):
        return message
    if _NO_ROOM.search(f"{type(error).__name__} {message}"):
        more = f" ({message})" if message else ""
        return f"there is not enough memory, take a smaller --batch, if the command has one{more}"
    return f"{type(error).__name__}: {message} (--debug shows where)"
