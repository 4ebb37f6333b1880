"""The order of messages suits NCCL: the messages between two ranks run in order, and a message is
sent only once the other rank is ready to receive it. gloo, which other tests use, keeps messages that
nobody waits for."""

import queue
import threading

import pytest
import torch

from lintra.ops.ring_attention import ring_attention
from lintra.ops.sequence_shard import SequenceShard, Span

TIME = 4


class Recording:
    """Ranks that are threads and record the order in which they send and receive."""

    def __init__(self, rank, mail):
        self.rank, self.size, self.mail = rank, len(mail), mail
        self.noted = []
        self.passed_on = self.most = 0  # tensors to the next rank since `finish_sent`

    def send(self, x, to):
        self.passed_on += to == self.rank + 1
        self.most = max(self.most, self.passed_on)
        self.noted.append((to, "send"))
        self.mail[to][self.rank].put(x.detach().clone())

    def under_way(self):
        return 0

    def finish_sent(self, since):
        self.passed_on = 0

    def receive(self, like, source):
        self.noted.append((source, "receive"))
        return self.mail[self.rank][source].get(timeout=60)


def attend(ranks):
    q, k, v = (torch.rand(1, TIME, 1, 4, requires_grad=True) for _ in range(3))
    shard = SequenceShard(ranks, [Span(TIME, [TIME], True, True, True)] * ranks.size)
    ring_attention(q, k, v, shard, scale=1.0).sum().backward()


def left_over(noted):
    """The messages between each pair of ranks that can never be delivered."""
    waiting = {
        (a, b): [what for other, what in noted[a] if other == b] for a in noted for b in noted if a != b
    }
    moved = True
    while moved:
        moved = False
        for a, b in waiting:
            here, there = waiting[a, b], waiting[b, a]
            if here and there and {here[0], there[0]} == {"send", "receive"}:
                del here[0], there[0]
                moved = True
    return {pair: messages for pair, messages in waiting.items() if messages}


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_ring(size):
    mail = [[queue.Queue() for _ in range(size)] for _ in range(size)]
    ranks = [Recording(rank, mail) for rank in range(size)]
    threads = [threading.Thread(target=attend, args=(each,)) for each in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ranks[0].noted) > size
    assert left_over({each.rank: each.noted for each in ranks}) == {}
    assert [each.most for each in ranks] == [2] * (size - 1) + [0]  # the keys and values of one block
