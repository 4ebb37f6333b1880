"""`lintra web`."""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from lintra import web
from lintra.checkpoint import write_atomically
from lintra.cli._arguments import UsageError, parse
from lintra.cli._model import open_model
from lintra.export.runtime import Weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Watch a model draw in the browser, and have it complete your own drawing."""

    model: Path = Path("mnist-small")  # the folder of a run or checkpoint, or what comes with lintra
    port: int = 8642  # of 127.0.0.1; 0: a free one
    output: Path | None = None  # write the page into this file instead, which works without a server
    weights: Weights = "float16"  # how they are kept in the page

    def __post_init__(self):
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port must lie in 0 .. 65535, got {self.port}")
        if self.output is not None and self.output.suffix not in (".html", ".htm"):
            raise ValueError(f"output must end in .html, got {self.output}")
        if self.output is not None and self.output.is_dir():
            raise ValueError(f"output must be a file, got the folder {self.output}")


def web_command(args: Sequence[str]) -> int:
    options = parse(Options, args, prog="lintra web", description=Options.__doc__ or "")
    model, task = open_model(options.model, "cpu", None)
    if reason := web.why_not(model, task):
        raise UsageError(f"there is no page of {options.model}: {reason}")
    page = web.page(model, task, options.model.resolve().name, options.weights)
    if options.output is not None:
        write_atomically(options.output, lambda place: place.write_text(page, encoding="utf-8"))
        print(f"{options.output}: {options.output.stat().st_size / 1e6:.2f} MB")
        return 0
    with web.Server(page, options.port) as server:
        print(f"{server.address} (Ctrl-C ends it)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0
