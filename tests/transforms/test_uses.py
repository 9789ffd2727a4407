"""What people compute with a model and around it: in its first call after `unit_scale` it is what
the plain class computes from the same values, with the same gradients."""

import copy
from collections import namedtuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.shared import filterwarnings, linears, pairs, parametrize
from tests.transforms.models import (
    ROWS,
    Net,
    OfLayer,
    attention_of_a_graph,
    own,
    sparse,
)
from unit_scaling.transforms import unit_scale

# torch's own, once a process
pytestmark = filterwarnings("ignore:Sparse (invariant checks|CSR):UserWarning")

IN, HIDDEN, OUT = 8, 16, 4


Use = namedtuple("Use", "make run")
"""make: the plain model. run: uses a model and an input that requires a gradient, and returns
tensors to compare besides all gradients."""


USES = {}


class Dot(nn.Module):
    """A product of two values."""

    def forward(self, x, weight):
        return F.linear(x, weight)


def made_of(forward):
    """A model of a forward, with two layers, a weight, products and a place for values."""

    def make():
        layers = {"up": nn.Linear(IN, HIDDEN), "down": nn.Linear(HIDDEN, OUT)}
        model = Net(forward, **layers, dot=Dot(), again=Dot())
        model.flat = nn.Linear(HIDDEN, HIDDEN, bias=False)
        model.weight = nn.Parameter(0.3 * torch.randn(HIDDEN, HIDDEN))
        model.held = None
        return model

    return make


def hidden(m, x):
    return m.up(x).tanh()


def mse(y):
    return (y - 0.3).square().mean()


mlp = made_of(lambda m, x: m.down(hidden(m, x)))
step = lambda m, x: mse(m(x)).backward()  # noqa: E731


def use(make=mlp):
    def add(run):
        USES[run.__name__.replace("_", " ")] = Use(make, run)
        return run

    return add


# What a forward pass does


@torch.no_grad()
def divide(w):
    return w.div_(w.norm(dim=1, keepdim=True))


def written_views(m, x):
    y, buffer = m.up(x), x.new_zeros(len(x), HIDDEN)
    buffer[:, :IN].add_(3 * y[:, :IN])
    buffer[:, IN:].copy_(y[:, IN:].sin())
    return buffer


def adapted(m, x):
    """Adapts a weight to each row by a step of gradient descent."""

    def task(x):
        error = lambda w: mse(m.down(functional_call(m.up, w, (x,)).tanh()))  # noqa: E731
        weights = dict(m.up.named_parameters())
        slopes = grad(error)(weights)
        return functional_call(
            m.up, {n: w - slopes[n] for n, w in weights.items()}, (x,)
        ).tanh()

    return vmap(task)(x)


rounded = own(torch.round, lambda g, y: g)
sign = own(torch.sign, lambda g, x: g * (x.abs() < 1))
extension = own(
    lambda x, w: torch.from_numpy(x.detach().numpy() @ w.detach().numpy().T),
    lambda g, x, w: (g @ w, g.mT @ x),
)

#: What is between the first layer and the last one.
INSIDE = {
    "weight, normalised": lambda m, x: m.dot(hidden(m, x), F.normalize(m.weight)),
    "weight, normalised in place": lambda m, x: m.dot(hidden(m, x), divide(m.weight)),
    "weight, low rank": lambda m, x: m.dot(
        hidden(m, x), m.weight[:, :2] @ m.weight[:2]
    ),
    "weight and transpose": lambda m, x: m.again(
        m.dot(hidden(m, x), m.weight), m.weight.T
    ).sin(),
    "sign of a weight": lambda m, x: F.linear(hidden(m, x), sign(10 * m.weight)),
    "straight through": lambda m, x: rounded(3 * m.up(x)).tanh(),
    "function of a layer": lambda m, x: OfLayer.apply(
        x @ m.weight[:IN], m.weight, m.flat
    ),
    "checkpoint": lambda m, x: checkpoint(m.up, x, use_reentrant=False).tanh(),
    "checkpoint of a function": lambda m, x: checkpoint(
        lambda x: m.up(x) @ m.weight, x, use_reentrant=False
    ).sin(),
    "reentrant checkpoint": lambda m, x: checkpoint(m.up, x, use_reentrant=True).tanh(),
    "kernel of an extension": lambda m, x: extension(hidden(m, x), m.weight).tanh(),
    "writes into views": written_views,
    "adapted by vmap of grad": adapted,
    "sparse": lambda m, x: (
        sparse(torch.ones(16, dtype=x.dtype)).to_sparse_csr() @ hidden(m, x)
    ),
    "sparse, scores": lambda m, x: attention_of_a_graph(hidden(m, x)),
}
for _name, _of in INSIDE.items():
    USES[f"inside, {_name}"] = Use(made_of(lambda m, x, of=_of: m.down(of(m, x))), step)


def _force(m, x):
    x = x if x.requires_grad else x.clone().requires_grad_()
    return torch.autograd.grad(m.down(hidden(m, x)).sum(), x, create_graph=True)[0]


def _backward(m, x):
    mse(y := m.down(hidden(m, x))).backward()
    return y.detach()


USES["gradient inside"] = Use(made_of(_force), step)
USES["backward inside"] = Use(made_of(_backward), lambda m, x: m(x))


def parametrized(name):
    model = mlp()
    for layer in (model.up, model.down):
        getattr(parametrizations, name)(layer)
    return model


for _name in ("weight_norm", "spectral_norm", "orthogonal"):
    USES[_name] = Use(lambda name=_name: parametrized(name), step)

IDS = torch.arange(24).view(4, 6) * 7 % 10


def looked(max_norm):
    model = made_of(lambda m, ids: m.down(hidden(m, m.table(ids))))()
    model.table, model.up = (
        nn.Embedding(10, HIDDEN, max_norm=max_norm),
        nn.Linear(HIDDEN, HIDDEN),
    )
    model.down = nn.Linear(HIDDEN, 10)
    if max_norm is None:
        model.down.weight = model.table.weight
    return model


for _name, _norm in {"renormed": 0.5, "tied": None}.items():
    USES[f"table, {_name}"] = Use(
        lambda norm=_norm: looked(norm),
        lambda m, x: F.cross_entropy(m(IDS).flatten(0, 1), IDS.flatten()).backward(),
    )


# Hidden values in any place, results in any container


def keep(m, x):
    h = hidden(m, x)
    m.held = iter([h])
    return m.down(h)


USES["hidden in a generator"] = Use(
    made_of(keep), lambda m, x: (mse(m(x)) + next(m.held).sin().mean()).backward()
)


CONTAINERS = {
    "nested": (
        lambda y, h: {"a": [y, {"h": (h,)}]},
        lambda r: (r["a"][0], r["a"][1]["h"][0]),
    ),
    "distribution": (
        lambda y, h: torch.distributions.Normal(y, y.exp()),
        lambda r: (r.log_prob(torch.ones(OUT, dtype=torch.float64)),),
    ),
}
for _name, (_pack, _of) in CONTAINERS.items():
    USES[f"results in a {_name}"] = Use(
        made_of(lambda m, x, pack=_pack: pack(m.down(h := hidden(m, x)), h)),
        lambda m, x, of=_of: sum(map(mse, of(m(x)))).backward(),
    )


# Hooks


def flat(value):
    """The tensors in tuples, lists and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [t for item in value for t in flat(item)]
    return [value] if isinstance(value, Tensor) else []


def after(layer, change):
    """A forward hook: changes the result of a layer, or leaves it if that is None."""
    return layer.register_forward_hook(lambda _m, _a, y: change(y))


def small(g):
    return g.clamp(-1e-3, 1e-3)


HOOKS = {
    "forward, that writes": lambda m, seen: after(m.up, lambda y: y.mul_(0.5)),
    "forward, before": lambda m, seen: m.down.register_forward_pre_hook(
        lambda _m, a: a[0].cos()
    ),
    "forward, of all": lambda m, seen: nn.modules.module.register_module_forward_hook(
        lambda m, _a, y: 0.5 * y if isinstance(m, nn.Linear) else None
    ),
    "backward, that scales": lambda m, seen: m.down.register_full_backward_hook(
        lambda _m, i, o: (0.1 * i[0],)
    ),
    "tensor, that clips": lambda m, seen: after(
        m.up, lambda y: y.register_hook(small) and None
    ),
    "parameter, after": lambda m, seen: m.up.weight.register_post_accumulate_grad_hook(
        lambda p: seen.append(p.grad.clone())
    ),
}


def hooked(m, x, register):
    seen = []
    handle = register(m, seen)
    step(m, x)
    handle.remove()
    return seen


for _name, _register in HOOKS.items():
    USES[f"hook, {_name}"] = Use(mlp, lambda m, x, r=_register: hooked(m, x, r))


@use()
def hooks_of_saved_tensors(m, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        y = m(x)
    mse(y).backward()


# Gradients of gradients


@use()
def penalty_of_gradients(m, x):
    loss, weights = mse(m(x)), [m.up.weight, m.down.weight]
    grads = torch.autograd.grad(loss, weights, create_graph=True)
    (loss + sum(g.square().sum() for g in grads)).backward(retain_graph=True)
    product = sum((g * w.detach()).sum() for g, w in pairs(grads, weights))
    return torch.autograd.grad(product, weights)  # with the Hessian


# Recurrence and checkpoints


def _cell(m, given):
    x, state = given
    state = torch.tanh(m.up(x) + m.dot(state, m.weight))
    return m.down(state), state


@use(made_of(_cell))
def through_time(m, x):
    state, loss = torch.zeros(ROWS, HIDDEN, dtype=x.dtype), 0.0
    for number in range(5):
        y, state = m((x, state))
        loss = loss + mse(y)
        if number == 1:  # truncated
            state = state.detach()
    loss.backward()


@use(lambda: nn.Sequential(*(linears(IN, IN, nn.Tanh) for _ in range(3))))
def checkpoints_around(m, x):
    for reentrant in (False, True):
        mse(checkpoint(m, x, use_reentrant=reentrant)).backward()
        mse(checkpoint(m[1], m[0](x), use_reentrant=reentrant)).backward()
        mse(checkpoint_sequential(m, 2, x, use_reentrant=reentrant)).backward()


def outcome(use, model):
    """What a use returns, and all gradients that it leaves."""
    torch.manual_seed(1)
    x = torch.randn(ROWS, IN, dtype=torch.float64, requires_grad=True)
    found = {
        f"result {i}": t.detach().clone() for i, t in enumerate(flat(use.run(model, x)))
    }
    grads = {name: p.grad for name, p in [*model.named_parameters(), ("x", x)]}
    return found | {
        name: g.detach().clone() for name, g in grads.items() if g is not None
    }


@parametrize("name", USES)
def test_a_use_of_a_transformed_model_is_that_of_a_plain_one(name):
    use = USES[name]
    plain = use.make().double()
    model = unit_scale(plain)
    twin = copy.deepcopy(model)  # set in the first call of the model
    ours = outcome(use, model)
    plain.load_state_dict(twin.state_dict(), strict=True)
    theirs = outcome(use, plain)
    assert ours.keys() == theirs.keys()
    assert any(t.any() for t in theirs.values())
    for key, value in theirs.items():
        # Sums of a product depend on where its operands lie in memory.
        assert (ours[key] - value).norm() <= 1e-12 * value.norm() + 1e-15, key
