"""Copies of models that keep functions of their parts, or tensors of their last call."""

import pickle
from copy import deepcopy
from functools import partial

import torch
from torch import nn

import unit_scaling as uu
from fp8.common.copies import deep_copy
from tests.shared import Net, assert_same, linears, parametrize, refuses
from unit_scaling.transforms import compile, simulate_fp8, unit_scale


def keeping(m, x):
    """Keeps what it computes for who looks at it, in several places, and a function of a part."""
    m.maps = [m.body(x).softmax(-1)]
    m.seen = {"logits": m.run(m.maps[0])}
    m.last_loss = nn.functional.cross_entropy(
        m.seen["logits"], torch.arange(len(x)) % 4
    )
    return m.last_loss


def test_a_model_that_keeps_tensors_of_its_last_call():
    """`deepcopy` refuses those with a graph: of copies they have the values."""
    head = nn.Linear(8, 4)
    plain = Net(keeping, body=nn.Linear(8, 8), head=head, run=lambda x: head(x))
    x = torch.randn(8, 8)
    plain(x)
    with refuses("graph leaves", RuntimeError):
        deepcopy(plain)
    other = deep_copy(plain)
    assert_same(other.maps[0], plain.maps[0])
    assert other.last_loss.grad_fn is None
    ours = unit_scale(plain)
    ours(x).backward()
    assert all(p.grad is not None for p in ours.parameters())
    assert uu.verify(ours, x).share("gradient") > 0
    for transformed in (simulate_fp8(ours), compile(ours)):
        assert isinstance(transformed, Net)


class Tapped(nn.Module):
    """Reads a hidden layer by a hook of its own, as BYOL does."""

    def __init__(self):
        super().__init__()
        self.net = linears(8, 16, nn.ReLU, 4)
        self.projector = nn.Linear(16, 8)
        self.hidden = {}
        self.net[1].register_forward_hook(self.keep)

    def keep(self, module, args, output):
        self.hidden[args[0].device] = output.flatten(1)

    def forward(self, x):
        self.hidden.clear()
        self.net(x)
        return self.projector(self.hidden.pop(x.device))


def test_a_model_may_read_what_its_own_hook_keeps():
    plain, x = Tapped(), torch.randn(64, 8)
    seen = []
    # A hook of someone else's.
    plain.net.register_forward_hook(lambda *args: seen.append(args))
    ours = unit_scale(plain)
    ours(x).square().mean().backward()
    assert not plain.hidden
    assert any(
        row.path == "projector" and row.done == "scaled" for row in uu.report(ours)
    )
    seen.clear()
    ours(x)
    assert len(seen) == 1
    assert ours.net[0].weight.grad is not None
    assert plain.net[0].weight.grad is None
    assert simulate_fp8(ours)(x).isfinite().all()


def test_parametrized_layers_have_copies_of_their_own():
    """torch's copy of such a layer is made from an object that is gone after it: its id is free."""
    layers = [nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)) for _ in range(30)]
    model = unit_scale(nn.Sequential(*layers))
    for _ in range(3):
        assert len(list(deepcopy(model).modules())) == len(list(model.modules()))


def ordinary():
    net = linears(8, 16, nn.GELU, 16)
    return nn.Sequential(net, nn.Linear(16, 4))


class Pickling(nn.Sequential):
    """Copies a part by pickling it, as the modules of e3nn with generated code do."""

    def __getstate__(self):
        parts = {name: part for name, part in self._modules.items() if name != "0"}
        return {**vars(self), "_modules": parts, "pickled": pickle.dumps(self[0])}

    def __setstate__(self, state):
        part = pickle.loads(state.pop("pickled"))
        super().__setstate__(state)
        self._modules = {"0": part, **self._modules}


def test_a_part_that_its_owner_copies_by_pickling():
    """It is transformed as in a model that copies it in the ordinary way."""
    results = []
    for kind in (nn.Sequential, Pickling):
        torch.manual_seed(0)
        ours, x = unit_scale(kind(*ordinary())), torch.randn(64, 8)
        ours(x).square().mean().backward()
        results.append(
            [ours(x), simulate_fp8(ours)(x), *(p.grad for p in ours.parameters())]
        )
    assert_same(results[1], results[0])


def halved(grad, layer, seen):
    """A hook of a parameter that refers to its layer."""
    seen.append(layer)
    return grad / 2


@parametrize("transform", [unit_scale, simulate_fp8, compile])
def test_hooks_of_parameters_are_copied(transform, no_code):
    """A mask of a gradient would be lost silently. What refers to a part refers to that of the
    copy, and a frozen parameter stays frozen."""
    model, mask = linears(8, 8, 4), torch.arange(8.0) % 2
    seen = []
    done = []
    model[0].weight.register_hook(lambda grad: grad * mask)
    model[1].weight.register_hook(partial(halved, layer=model[1], seen=seen))
    model[1].weight.register_post_accumulate_grad_hook(done.append)
    model[0].bias.requires_grad_(False)
    ours = transform(model)
    for _ in range(2):
        ours(torch.randn(16, 8)).square().mean().backward()
    assert_same(ours[0].weight.grad.any(0), mask.bool())
    assert {id(part) for part in seen} == {id(ours[1])}
    assert {id(part) for part in done} == {id(ours[1].weight)}
    assert not ours[0].bias.requires_grad
