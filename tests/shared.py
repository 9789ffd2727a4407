"""What many tests share: marks, refusals, operands, copies and small models."""

import functools
import io
import operator
import pickle
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from fp8.casts.watch import watch_of
from tests.fp8 import operands

parametrize = pytest.mark.parametrize
sampled = pytest.mark.sampled
filterwarnings = pytest.mark.filterwarnings
normal, randn = operands.normal, operands.randn
pairs = functools.partial(zip, strict=True)
assert_close = torch.testing.assert_close

#: Warnings of other libraries are theirs to fix.
theirs = filterwarnings("ignore")


def proves(system, *features, how="own"):
    """What a test shows of `docs.features`."""
    return pytest.mark.proves(system, *features, how=how)


def one_in(every, value):
    """A parameter: `make test` runs one of so many cases that have it, as with `sampled`."""
    return pytest.param(value, marks=sampled(every))


def assert_same(found, expected, **options):
    """To the bit, with their dtypes: tensors, and collections of them."""
    assert_close(found, expected, rtol=0, atol=0, **options)


def same(one, other):
    """Whether each tensor is equal to its counterpart."""
    return all(map(torch.equal, one, other))


def refuses(match, error=ValueError):
    """A block that must raise ``error`` with a message that matches."""
    return pytest.raises(error, match=match)


def warns(match, kind):
    """A block that must warn of this kind with a message that matches."""
    return pytest.warns(kind, match=match)


class Net(nn.Module):
    """A module from a function of (self, x), if it is called, and its parts: modules, parameters
    and other values."""

    def __init__(self, fn=None, **parts):
        super().__init__()
        self.fn = fn
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.fn(self, x)


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


def tied(model):
    """Its head has the weight of its embedding."""
    model.head.weight = model.embed.weight
    return model


def both(one, other):
    """The parameters of two models in pairs."""
    return zip(one.parameters(), other.parameters(), strict=True)


def rms(x):
    return x.detach().double().square().mean().sqrt().item()


def seeded(seed):
    """A generator of random numbers."""
    return torch.Generator().manual_seed(seed)


def normals(seed):
    """A function of a shape: standard normal numbers in float64, others in each call."""
    draw = functools.partial(torch.randn, dtype=torch.float64, generator=seeded(seed))
    return lambda *shape: draw(shape)


@contextmanager
def quietly():
    """Without the warnings of other libraries."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def descend(optimizer, losses):
    """A step for each loss, which is computed after the one before it; their values."""
    values = []
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


@contextmanager
def said(kind=Warning):
    """The messages of all warnings of a kind in a block, once it has ended."""
    messages = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(w.message) for w in caught if issubclass(w.category, kind)]


def by_path(rows, *names):
    """Path -> the row of a report, or what it has under some names."""
    what = operator.attrgetter(*names) if names else lambda row: row
    return {row.path: what(row) for row in rows}


def paths(rows, done):
    """Of the rows of a report that this was done to."""
    return {row.path for row in rows if row.done == done}


def saved(thing, weights_only=True):
    """What a file of torch has of it."""
    torch.save(thing, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def pickled(thing):
    """A copy by pickle."""
    return pickle.loads(pickle.dumps(thing))


def in_one_graph(function, backend="aot_eager"):
    """Compiled, without a break."""
    return torch.compile(function, backend=backend, fullgraph=True)


def settle(model, checks=False):
    """The next passes of a converted model are not looked at. checks: whether graphs check spots in
    the first of them."""
    watch = watch_of(model)
    watch.step, watch.looks, watch.checks = (1 << 8) + 1, False, checks
