"""Images unlike those a model learned from, to see whether it can tell."""

import torch
from torch import Tensor
from torch.nn import functional as F

from lintra.tasks import PixelTask, digits


def out_of_domain(task: PixelTask, images: Tensor, seed: int = 0) -> dict[str, Tensor]:
    """Make images of other kinds, of the size and number of `images`: kind -> uint8 levels [n h*w*ch].

    The bundled 8 x 8 digits, enlarged, are among them where the images are grey and larger.
    """
    draw = torch.Generator().manual_seed(seed)
    height, width, channels = task.image_shape
    pixels = images.unflatten(1, (height * width, channels))
    order = torch.rand(pixels.shape[:2], generator=draw).argsort(1)
    found = {
        "inverted": task.levels - 1 - images,
        "pixels shuffled": pixels.gather(1, order[..., None].expand_as(pixels)).flatten(1),
        "uniform noise": torch.randint(task.levels, images.shape, generator=draw, dtype=torch.uint8),
        "black": torch.zeros_like(images[:1]),
    }
    if channels == 1 and height > 8 and width > 8:
        found["8 x 8 digits, enlarged"] = _enlarged(task, len(images))
    return found


def _enlarged(task: PixelTask, n: int) -> Tensor:
    small = digits.Config().build()
    pictures = small.to_images(small.test.values[:n]).movedim(-1, 1).float()
    size = task.image_shape[:2]
    large = F.interpolate(pictures, size, mode="bicubic", align_corners=False).round().clamp(0, 255)
    return task.to_tokens(large.movedim(1, -1).to(torch.uint8)).to(torch.uint8)
