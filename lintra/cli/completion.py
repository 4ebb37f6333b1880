"""`lintra completion bash|zsh`: a completion script, made from the help of every command."""

import contextlib
import io
import re
from collections.abc import Callable, Sequence

from lintra.cli import COMMANDS, command
from lintra.cli.arguments import UsageError

SHELLS = ("bash", "zsh")
_NAMED = (
    "train",
    "bench",
    "prepare",
)  # commands with names of their own behind them, each with flags of its own
_LOADS_BASH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def completion(args: Sequence[str]) -> int:
    """Print a script for a shell -> 0. Raises UsageError for another shell."""
    if not args or args[0] in ("-h", "--help"):
        print("lintra completion bash|zsh: a script by which Tab completes commands, flags\n")
        print("  lintra completion bash > FILE    once, then `source FILE` in ~/.bashrc")
        return 0
    if list(args) not in [[shell] for shell in SHELLS]:
        raise UsageError(f"completion is for {' or '.join(SHELLS)}, got {' '.join(args)!r}")
    print((_LOADS_BASH if args[0] == "zsh" else "") + script(words()), end="")
    return 0


def words() -> dict[str, list[str]]:
    """Return the names and flags that may follow each command, and each command with a name behind it."""
    found: dict[str, list[str]] = {"completion": list(SHELLS)}
    for name in COMMANDS.keys() - found:
        text = _help(command(name))
        names = _names(text) if name in _NAMED else []
        found[name] = [*names, *_flags(text)]
        found |= {f"{name} {each}": _flags(_help(command(name), each)) for each in names}
    return found


def script(words: dict[str, list[str]]) -> str:
    """Return a bash function that completes these words; where there are none, bash completes files."""
    more = [
        f"    '{place} '*) words='{' '.join(each)}' ;;"
        for place, each in sorted(words.items(), key=lambda item: item[0], reverse=True)
    ]
    lines = [
        "_lintra() {",
        "  local current=${COMP_WORDS[COMP_CWORD]} words=''",
        '  case "${COMP_WORDS[*]:1:COMP_CWORD-1} " in',
        *more,  # the longest first
        f"    ' ') words='{' '.join(COMMANDS)} --help --version --debug' ;;",
        "  esac",
        '  [[ $COMP_CWORD -gt 2 && ${COMP_WORDS[COMP_CWORD-1]} == --* && $current != -* ]] && words=""',
        '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "}",
        "complete -o default -F _lintra lintra",
    ]
    return "\n".join(lines) + "\n"


def _help(command: Callable[[Sequence[str]], int], *args: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        command([*args, "--help"])
    return printed.getvalue()


def _names(text: str) -> list[str]:
    """The names that lines of a help begin with; other lines are examples."""
    return [name for name in re.findall(r"^  ([a-z][\w-]*) ", text, re.MULTILINE) if name != "lintra"]


def _flags(text: str) -> list[str]:
    """The flags that lines of a help begin with; where it is a few lines of usage, those in them."""
    found = re.findall(r"^  (?:-\w \w+, )?(--[a-z][\w-]*)", text, re.MULTILINE)
    usage = " ".join(line for line in text.splitlines() if "lintra " in line)
    found = found or re.findall(r"(?<![\w-])--[a-z][\w-]*", usage)
    return [flag for flag in dict.fromkeys([*found, "--help"]) if flag != "--flag"]
