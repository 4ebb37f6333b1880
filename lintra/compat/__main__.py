"""`python -m lintra.compat program.py ...` runs an unmodified program on lintra's CPU kernels.

python -m lintra.compat program.py --its --own flags
python -m lintra.compat -m package.module --its --own flags
"""

import runpy
import sys
from pathlib import Path

from lintra.compat import install


def main() -> int:
    """Install the stand-ins, then run the program as Python would -> the exit code of a wrong call."""
    args = sys.argv[1:]
    module = args[:1] == ["-m"]
    if module:
        args = args[1:]
    if not args or args[0] in ("-h", "--help"):
        print(__doc__, file=sys.stdout if args else sys.stderr)
        return 0 if args else 2
    if not module and not Path(args[0]).exists():
        print(f"lintra.compat: there is no program {args[0]}", file=sys.stderr)
        return 2
    install()
    sys.argv = args
    if module:
        runpy.run_module(args[0], run_name="__main__", alter_sys=True)
    else:
        if not getattr(sys.flags, "safe_path", False):  # of Python 3.11: with it, no place is put first
            sys.path[0] = str(Path(args[0]).resolve().parent)
        runpy.run_path(args[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
