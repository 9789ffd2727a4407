"""Every test here begins with the same random numbers, and with nothing that is compiled."""

import sys

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
