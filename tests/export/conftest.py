"""Fixtures for tests of exports."""

import pytest


@pytest.fixture
def opset_27(monkeypatch):
    """onnxruntime refuses an opset that was not released when it was built, unless it is told not to."""
    monkeypatch.setenv("ALLOW_RELEASED_ONNX_OPSET_ONLY", "0")
