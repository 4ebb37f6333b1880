import hashlib
import math
import re
from importlib.resources import files

import torch

from lintra.attention import linear
from lintra.tasks import digits
from tests.tasks.conftest import assert_a_step_lowers_the_loss


def test_the_bundled_file_is_what_its_readme_says():
    folder = files("lintra.tasks") / "data"
    published = re.findall("[0-9a-f]{64}", (folder / "README.md").read_text())
    task = digits.Config().build()
    content = b"".join(task.images(split).tobytes() for split in ("train", "validate", "test"))
    assert hashlib.sha256((folder / "digits.npz").read_bytes()).hexdigest() == published[0]
    assert hashlib.sha256(content).hexdigest() == published[1]


def test_split_and_levels():
    task = digits.Config().build()
    assert (len(task.train), len(task.validate), len(task.test)) == (1500, 147, 150)
    train = task.images("train")
    assert train.shape == (1500, 8, 8, 1)
    assert (train.min(), train.max()) == (0, 16)


def test_a_model_that_knows_nothing_pays_log_n():
    task = digits.Config().build()
    model = task.model(linear.Config()).build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    batch = task.validate.__getitems__(range(4))
    score = task.score(model, batch)
    torch.testing.assert_close(task.loss(model, batch), torch.tensor(math.log(17)))
    torch.testing.assert_close(score["bits_per_dim"], torch.tensor(math.log2(17)))
    assert score["weight"].item() == 4 * 64


def test_one_step_lowers_the_loss():
    torch.manual_seed(0)
    task = digits.Config().build()
    assert_a_step_lowers_the_loss(task, samples=16)
