"""What tests of several folders need."""

import pytest
import torch


@pytest.fixture
def one_thread(monkeypatch):
    """On one thread of the CPU: sums come out in one order, and tiny work does not wait for other threads."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
