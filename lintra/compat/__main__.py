"""`python -m lintra.compat program.py ...` runs an unmodified program on lintra's CPU kernels.

python -m lintra.compat program.py --its --own flags
python -m lintra.compat -m package.module --its --own flags
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from lintra.compat.stand_ins import install_everywhere


def main() -> int:
    """Install the stand-ins, then run the program as Python would -> the exit code of a wrong call."""
    args = sys.argv[1:]
    module = args[:1] == ["-m"]
    if module:
        args = args[1:]
    if not args or args[0] in ("-h", "--help"):
        print(__doc__, file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    path = Path(args[0])
    if not module and not path.exists():
        print(f"lintra.compat: there is no program {path}", file=sys.stderr)
        return 2
    install_everywhere()
    sys.argv = args
    spec = _module(args[0]) if module else _program(path.absolute())
    loader: Any = spec and spec.loader
    if spec is None or loader is None:
        print(f"lintra.compat: there is no module {args[0]}, or no __main__ in it", file=sys.stderr)
        return 2
    program = module_from_spec(spec)
    program.__name__ = "__main__"
    is_file = spec.origin == str(path.absolute())
    if is_file:
        program.__spec__ = program.__package__ = None  # as Python has it for a file
    if module:
        sys.argv[0] = str(spec.origin)
    elif not getattr(sys.flags, "safe_path", False):  # of Python 3.11: with it, no place is put first
        sys.path[0] = str(path.resolve().parent if is_file else path.absolute())
    # Kept for the life of the process, unlike runpy, which removes it at the program's end: pickle looks for
    # its classes there, also in functions of atexit, and multiprocessing for the file that a process begins
    # with, whose own module of the program has the second name.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = program
    exec(loader.get_code(spec.name), vars(program))
    return 0


class _Program(SourceFileLoader):
    """A file as Python runs it, without writing bytecode beside it."""

    def set_data(self, *_: Any, **__: Any) -> None:
        pass


def _program(path: Path) -> ModuleSpec | None:
    """Return where the code of a file is, or of the __main__ in a folder or archive."""
    spec = PathFinder.find_spec("__main__", [str(path)])
    if spec is not None or path.is_dir():
        return spec
    loader = None if path.suffix == ".pyc" else _Program("__main__", str(path))
    return spec_from_file_location("__main__", path, loader=loader)


def _module(name: str) -> ModuleSpec | None:
    """Return where the code of `-m name` is: the module, or the __main__ of a package; None without one."""
    try:
        spec = None if name.startswith(".") else find_spec(name)
    except ModuleNotFoundError as error:  # a package around it is missing, or one that it imports
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return None
    package = spec is not None and spec.submodule_search_locations is not None
    return find_spec(f"{name}.__main__") if package else spec


if __name__ == "__main__":
    sys.exit(main())
