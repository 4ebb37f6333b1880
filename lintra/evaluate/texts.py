"""Predictions for each text of a test set."""

from collections.abc import Iterator, Sequence
from typing import Any

from lintra.generation.sampling import evaluation
from lintra.models import BiLSTM, Encoder
from lintra.tasks import Report
from lintra.tasks.text_classification import TextClassification, as_json


def predictions(
    model: Encoder | BiLSTM,
    task: TextClassification,
    indices: Sequence[int],
    *,
    batch: int,
    report: Report = lambda done: None,
) -> Iterator[dict[str, Any]]:
    """Yield, for JSON, each text of the task's test set at these places, as much of it as is read, with its
    label, `reference`, the most probable one, `label`, and the probabilities of all, `scores`.

    report: is called with how many are done.
    """
    texts, labels = task.test.texts, task.test.labels.tolist()
    with evaluation(model):
        for first in range(0, len(indices), batch):
            chosen = indices[first : first + batch]
            found = task.ranked(model, [texts[i] for i in chosen])
            for i, scores in zip(chosen, found, strict=True):
                said = {"text": texts[i].decode(errors="replace"), "reference": task.classes[labels[i]]}
                yield said | as_json(scores)
            report(min(first + batch, len(indices)))
