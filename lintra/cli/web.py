"""`lintra web`."""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from lintra import checkpoint, train, web
from lintra.cli.arguments import UsageError, changed, parse
from lintra.export.runtime import Weights
from lintra.io.files import refuse_folder, write_atomically
from lintra.models import CTC


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Run a model in the browser: it completes your drawing, or transcribes what you say."""

    model: Path = Path("mnist-small")  # folder of a run or checkpoint, or a bundled model
    port: int = 8642  # of 127.0.0.1; 0: a free one
    out: Path | None = None  # write the page into this file instead, which works without a server
    weights: Weights = "float16"  # their format in the page

    def __post_init__(self):
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port must lie in 0 .. 65535, got {self.port}")
        if self.out is not None and self.out.suffix not in (".html", ".htm"):
            raise ValueError(f"out must end in .html, got {self.out}")
        if self.out is not None and changed(self, ("port",)):
            raise ValueError(f"port is for a page that is served, and out writes it to {self.out}")
        refuse_folder("out", self.out)


def web_command(args: Sequence[str]) -> int:
    options = parse(Options, args, prog="lintra web", description=Options.__doc__ or "")
    model = checkpoint.load(options.model)
    # A recogniser's file holds all that transcription needs.
    task = None if isinstance(model, CTC) else train.Run.around(options.model).task.build()
    if reason := web.why_not(model, task):
        raise UsageError(f"there is no page for {options.model}: {reason}")
    page = web.page(model, task, options.model.resolve().name, options.weights)
    if options.out is not None:
        write_atomically(options.out, lambda place: place.write_text(page, encoding="utf-8"))
        print(f"{options.out}: {options.out.stat().st_size / 1e6:.2f} MB")
        return 0
    with web.Server(page, options.port) as server:
        print(f"{server.address} (Ctrl-C ends it)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0
