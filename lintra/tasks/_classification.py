"""Tasks that classify sequences."""

import torch
from torch import Tensor
from torch.nn import functional

from lintra.models import BiLSTM, Encoder
from lintra.tasks.base import Batch, Task


class ClassificationTask(Task):
    """A task on batches of "tokens" [b t] int64, their "mask" [b t] bool, absent where all are real, and a
    "label" [b] int64, for a network that makes one output of a sequence."""

    loss_unit = "nats a sequence"

    def loss(self, model: Encoder | BiLSTM, batch: Batch) -> Tensor:
        return functional.cross_entropy(logits(model, batch), batch["label"])

    def weight(self, batch: Batch) -> Tensor:
        return torch.tensor(len(batch["label"]), device=batch["label"].device)

    @torch.no_grad()
    def per_sample(self, model: Encoder | BiLSTM, batch: Batch) -> dict[str, Tensor]:
        """The loss of each sequence in nats, and 1 where the most probable class is right."""
        found, label = logits(model, batch), batch["label"]
        return {
            "loss": functional.cross_entropy(found, label, reduction="none"),
            "accuracy": (found.argmax(-1) == label).to(found.dtype),
            "weight": torch.ones_like(label),
        }


def logits(model: Encoder | BiLSTM, batch: Batch) -> Tensor:
    """Return the logits [b classes] of a batch, in float32 at least."""
    found = model(batch["tokens"], mask=batch.get("mask"))
    return found if found.dtype == torch.float64 else found.float()
