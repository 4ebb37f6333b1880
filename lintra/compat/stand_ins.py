"""Programs that import fla, mamba_ssm or causal_conv1d find lintra's CPU kernels under these names."""

import multiprocessing
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import spawn
from pkgutil import walk_packages
from types import ModuleType
from typing import Any

import torch

from lintra.compat import kernels


def install(*packages: str) -> dict[str, str]:
    """Have programs that import kernels of other packages find lintra's, before they import a model.

    packages: any of fla, mamba_ssm and causal_conv1d; by default all of them. Returns what was done
    for each: "stand-in", where it is not installed, or has no GPU to run on: `import mamba_ssm` finds
    lintra's modules; "wrapped", the installed fla: its functions send tensors on the CPU to lintra and all
    others to its own kernels; "left", where an installed package has its GPU. Done twice, it does nothing
    more.

    Raises ValueError for another package; ImportError for an installed fla that cannot be imported or lacks
    a function; RuntimeError where a package that cannot run here has been imported already. Warns of modules
    of transformers that were imported before and keep their slow functions.
    """
    unknown = set(packages) - set(kernels.PACKAGES)
    if unknown:
        raise ValueError(
            f"packages must be of {', '.join(kernels.PACKAGES)}; got {', '.join(sorted(unknown))}"
        )
    chosen = packages or kernels.PACKAGES
    # fla last: when its layers are imported, they look for the others.
    found = {package: _install(package) for package in sorted(chosen, key=lambda x: x == "fla")}
    done = {package: found[package] for package in chosen}
    late = [name for name, module in list(sys.modules.items()) if _fell_back(name, module, done)]
    if late:
        warnings.warn(
            f"{', '.join(late)} was imported before lintra.compat.install() and keeps its own functions: "
            "call lintra.accelerate(model) for its models, or install first",
            stacklevel=2,
        )
    return done


class _Everywhere:
    """Call `install_everywhere` in the process where this is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return install_everywhere, ()


def install_everywhere() -> None:
    """Install the stand-ins here, and in the processes of multiprocessing before they import the program.

    A process that is forked has them. One that is spawned, or comes from a server, reads its preparation data
    first, and imports the program's file then.
    """
    install()
    prepare = spawn.get_preparation_data
    spawn.get_preparation_data = lambda name: prepare(name) | {"lintra": _Everywhere()}
    if "forkserver" in multiprocessing.get_all_start_methods():
        multiprocessing.set_forkserver_preload([])  # not the program: the server itself has no stand-ins


def uninstall() -> None:
    """Undo `install`: modules imported since then keep what they found."""
    from lintra.compat.fla import installed

    installed.unwrap()
    for name, module in list(sys.modules.items()):
        if _stands_in(name, module):
            del sys.modules[name]


def alias(name: str, package: ModuleType) -> None:
    """Have `import name`, and all public modules below it, find a package and its modules."""
    modules = [module.name for module in walk_packages(package.__path__, f"{package.__name__}.")]
    aliases = [f"{package.__name__}.{alias}" for alias in getattr(package, "ALIASES", ())]
    for module in [package.__name__, *(x for x in modules if "._" not in x), *aliases]:
        sys.modules[name + module.removeprefix(package.__name__)] = import_module(module)


def _install(package: str) -> str:
    found = sys.modules.get(package)
    if _stands_in(package, found):
        return "stand-in"
    if package == "fla" and _is_installed(package):
        from lintra.compat.fla import installed

        installed.wrap()
        return "wrapped"
    if _is_installed(package) and torch.cuda.is_available():
        return "left"
    if found is not None:
        raise RuntimeError(
            f"{package} is imported already, from {found.__file__}, and has no GPU here: "
            "lintra.compat.install() must come before whatever imports it"
        )
    alias(package, import_module(f"lintra.compat.{package}"))
    return "stand-in"


def _is_installed(package: str) -> bool:
    """Return whether a package of this name other than the stand-in can be found."""
    if package in sys.modules:
        return sys.modules[package] is not None
    spec = find_spec(package)
    return spec is not None and spec.origin is not None  # a folder without __init__.py has none


def _stands_in(name: str, module: ModuleType | None) -> bool:
    """Return whether a module is ours under a name of one of the packages."""
    package = name.partition(".")[0]
    ours = f"lintra.compat.{package}"
    return package in kernels.PACKAGES and f"{getattr(module, '__name__', '')}.".startswith(f"{ours}.")


def _fell_back(name: str, module: ModuleType, done: dict[str, str]) -> bool:
    """Return whether a module of transformers was imported before its kernels were replaced by lintra's."""
    if not name.startswith("transformers.models.") or ".modeling_" not in name:
        return False
    return any(done.get(package) in ("stand-in", "wrapped") for package in kernels.slow(module))
