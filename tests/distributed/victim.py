"""`lintra`, some of whose processes get a signal: the JSON list VICTIMS says which, when and what.

[{"attempt": 0, "rank": 1, "step": 7, "signal": 9, "where": "step", "delay": 0.01}]: 0.01 s after the step
(from 0) has begun; in "save", when the checkpoint after so many steps has been written but has not yet got
its name; in "start", step 0, before the process joins the others. "to" says who gets it: "self", "parent",
which started this process, or "both".
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from lintra.cli import main
from lintra.io import files
from lintra.train import loop
from lintra.train.learner import Learner

VICTIMS = json.loads(os.environ["VICTIMS"])


def strike(where: str, rank: int, step: int) -> None:
    """Send the signal that is due now, if any; a delayed one is sent from a separate thread."""
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    for each in VICTIMS:
        if (each.get("attempt", 0), each["rank"], each["step"], each.get("where", "step")) == (
            attempt,
            rank,
            step,
            where,
        ):
            delay = each.get("delay", 0.0)
            threading.Thread(target=send, args=(each, delay), daemon=True).start()
            time.sleep(0.0 if delay else 5.0)  # wait here for the signal


def send(each: dict[str, Any], delay: float) -> None:
    time.sleep(delay)
    signum, to = each.get("signal", signal.SIGKILL), each.get("to", "self")
    if to != "self":
        os.kill(os.getppid(), signum)
    if to != "parent":
        os.kill(os.getpid(), signum)


def on_train_batch_start(learner: Learner, *args: Any, before=Learner.on_train_batch_start) -> None:
    strike("step", learner.trainer.global_rank, learner.trainer.global_step)
    before(learner, *args)


def model(*args: Any, before=loop._model) -> Any:
    strike("start", int(os.environ.get("LOCAL_RANK", "0")), 0)
    return before(*args)


def put(new: Path, path: Path, before=files._put) -> None:
    if path.name.startswith("step-"):
        strike("save", 0, int(path.name.removeprefix("step-")))
    before(new, path)


Learner.on_train_batch_start = on_train_batch_start
loop._model = model
files._put = put

if __name__ == "__main__":
    sys.exit(main())
