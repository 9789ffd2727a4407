"""What many tests share: marks, refusals, operands, copies and small models."""

import functools
import io
import pickle
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from fp8.casts.watch import watch_of
from tests.fp8 import operands

parametrize = pytest.mark.parametrize
normal, randn = operands.normal, operands.randn
pairs = functools.partial(zip, strict=True)


def refuses(match, error=ValueError):
    """A block that must raise ``error`` with a message that matches."""
    return pytest.raises(error, match=match)


def warns(match, kind):
    """A block that must warn of this kind with a message that matches."""
    return pytest.warns(kind, match=match)


def linears(width, *parts):
    """An nn.Sequential of linear layers of these widths, from ``width`` on, and of what is made of
    the classes between them: ``linears(16, 32, nn.GELU, 4)``."""
    layers = []
    for part in parts:
        if isinstance(part, int):
            layers.append(nn.Linear(width, part))
            width = part
        else:
            layers.append(part())
    return nn.Sequential(*layers)


def both(one, other):
    """The parameters of two models in pairs."""
    return zip(one.parameters(), other.parameters(), strict=True)


def seeded(seed):
    """A generator of random numbers."""
    return torch.Generator().manual_seed(seed)


@contextmanager
def quietly():
    """Without the warnings of other libraries."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def saved(thing):
    """What a file of torch has of it."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def pickled(thing):
    """A copy by pickle."""
    return pickle.loads(pickle.dumps(thing))


def in_one_graph(function, backend="aot_eager"):
    """Compiled, without a break."""
    return torch.compile(function, backend=backend, fullgraph=True)


def settle(model):
    """The next passes of a converted model are not looked at."""
    watch = watch_of(model)
    watch.step, watch.looks = 1 << 8, False
