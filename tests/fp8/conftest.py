"""Each test begins with the same random numbers, and with nothing compiled."""

import sys

import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh():
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
