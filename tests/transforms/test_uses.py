"""What people compute with a model and around it: after `unit_scale`, and in its first call, it is
what the plain class computes from the same values, with the same gradients."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.transforms.models import ROWS, Net, OfLayer, attention_of_a_graph, own, sparse
from unit_scaling.transforms import unit_scale

# torch's own, once a process
pytestmark = pytest.mark.filterwarnings("ignore:Sparse (invariant checks|CSR):UserWarning")

IN, HIDDEN, OUT = 8, 16, 4


class Use(NamedTuple):
    """make: the plain model. run: uses a model and an input that requires a gradient, and returns
    tensors to compare besides all gradients. called: whether the model has run before, as this
    does not begin with a call of all of it that has values."""

    make: Callable[[], nn.Module]
    run: Callable[[Any, Tensor], Any]
    called: bool = False


USES: dict[str, Use] = {}


class Dot(nn.Module):
    """A product of two values."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)


def made_of(forward: Callable[[Any, Tensor], Any]) -> Callable[[], nn.Module]:
    """A model of a forward, with two layers, a weight, products and a place for values."""

    def make() -> nn.Module:
        layers = {"up": nn.Linear(IN, HIDDEN), "down": nn.Linear(HIDDEN, OUT)}
        model = Net(forward, **layers, dot=Dot(), again=Dot())
        model.flat = nn.Linear(HIDDEN, HIDDEN, bias=False)
        model.weight = nn.Parameter(0.3 * torch.randn(HIDDEN, HIDDEN))
        model.held = None
        return model

    return make


def hidden(m: Any, x: Tensor) -> Tensor:
    return m.up(x).tanh()


def mse(y: Tensor) -> Tensor:
    return (y - 0.3).square().mean()


mlp = made_of(lambda m, x: m.down(hidden(m, x)))
step = lambda m, x: mse(m(x)).backward()  # noqa: E731


def use(make: Callable[[], nn.Module] = mlp, called: bool = False) -> Callable[..., Any]:
    def add(run: Callable[[Any, Tensor], Any]) -> Any:
        USES[run.__name__.replace("_", " ")] = Use(make, run, called)
        return run

    return add


# What a forward pass does


@torch.no_grad()
def divide(w: Tensor) -> Tensor:
    return w.div_(w.norm(dim=1, keepdim=True))


def written_views(m: Any, x: Tensor) -> Tensor:
    y, buffer = m.up(x), x.new_zeros(len(x), HIDDEN)
    buffer[:, :IN].add_(3 * y[:, :IN])
    buffer[:, IN:].copy_(y[:, IN:].sin())
    return buffer


def ensemble(m: Any, x: Tensor) -> Tensor:
    weights = torch.stack([m.weight, m.weight.sin()])
    return vmap(lambda w: torch.tanh(hidden(m, x) @ w))(weights).mean(0)


def adapted(m: Any, x: Tensor) -> Tensor:
    """Adapts a weight to each row by a step of gradient descent."""

    def task(x: Tensor) -> Tensor:
        error = lambda w: mse(m.down(functional_call(m.up, w, (x,)).tanh()))  # noqa: E731
        weights = dict(m.up.named_parameters())
        slopes = grad(error)(weights)
        return functional_call(m.up, {n: w - slopes[n] for n, w in weights.items()}, (x,)).tanh()

    return vmap(task)(x)


clipped = own(lambda y: y.clone(), lambda g, y: g * (1e-2 / g.norm()).clamp(max=1))
with_loss = own(lambda y, loss: y.clone(), lambda g, y, loss: (g, torch.ones_like(loss)))
rounded = own(torch.round, lambda g, y: g)
sign = own(torch.sign, lambda g, x: g * (x.abs() < 1))
extension = own(
    lambda x, w: torch.from_numpy(x.detach().numpy() @ w.detach().numpy().T),
    lambda g, x, w: (g @ w, g.mT @ x),
)

#: What is between the first layer and the last one.
INSIDE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "weight, normalised": lambda m, x: m.dot(hidden(m, x), F.normalize(m.weight)),
    "weight, normalised in place": lambda m, x: m.dot(hidden(m, x), divide(m.weight)),
    "weight, low rank": lambda m, x: m.dot(hidden(m, x), m.weight[:, :2] @ m.weight[:2]),
    "weight, in parts": lambda m, x: m.dot(hidden(m, x), torch.cat(m.weight.chunk(2)[::-1])),
    "weight and transpose": lambda m, x: m.again(m.dot(hidden(m, x), m.weight), m.weight.T).sin(),
    "sign of a weight": lambda m, x: F.linear(hidden(m, x), sign(10 * m.weight)),
    "clip": lambda m, x: clipped(hidden(m, x)),
    "straight through": lambda m, x: rounded(3 * m.up(x)).tanh(),
    "auxiliary loss": lambda m, x: with_loss(hidden(m, x), m.up(x).softmax(-1).mean(0).norm()),
    "function of a layer": lambda m, x: OfLayer.apply(x @ m.weight[:IN], m.weight, m.flat),
    "checkpoint": lambda m, x: checkpoint(m.up, x, use_reentrant=False).tanh(),
    "checkpoint of a function": lambda m, x: checkpoint(
        lambda x: m.up(x) @ m.weight, x, use_reentrant=False
    ).sin(),
    "reentrant checkpoint": lambda m, x: checkpoint(m.up, x, use_reentrant=True).tanh(),
    "kernel of an extension": lambda m, x: extension(hidden(m, x), m.weight).tanh(),
    "writes into views": written_views,
    "vmap of a part": ensemble,
    "adapted by vmap of grad": adapted,
    "sparse": lambda m, x: sparse(torch.ones(16, dtype=x.dtype)).to_sparse_csr() @ hidden(m, x),
    "sparse, learned": lambda m, x: torch.sparse.mm(sparse(m.weight[0]), hidden(m, x)),
    "sparse, scores": lambda m, x: attention_of_a_graph(hidden(m, x)),
}
for _name, _of in INSIDE.items():
    USES[f"inside, {_name}"] = Use(made_of(lambda m, x, of=_of: m.down(of(m, x))), step)


def _force(m: Any, x: Tensor) -> Tensor:
    x = x if x.requires_grad else x.clone().requires_grad_()
    return torch.autograd.grad(m.down(hidden(m, x)).sum(), x, create_graph=True)[0]


def _backward(m: Any, x: Tensor) -> Tensor:
    mse(y := m.down(hidden(m, x))).backward()
    return y.detach()


USES["gradient inside"] = Use(made_of(_force), step)
USES["backward inside"] = Use(made_of(_backward), lambda m, x: m(x))


def parametrized(name: str) -> nn.Module:
    model = mlp()
    for layer in (model.up, model.down):
        getattr(parametrizations, name)(layer)
    return model


for _name in ("weight_norm", "spectral_norm", "orthogonal"):
    USES[_name] = Use(lambda name=_name: parametrized(name), step)

IDS = torch.arange(24).view(4, 6) * 7 % 10


def looked(max_norm: float | None) -> nn.Module:
    model = made_of(lambda m, ids: m.down(hidden(m, m.table(ids))))()
    model.table, model.up = nn.Embedding(10, HIDDEN, max_norm=max_norm), nn.Linear(HIDDEN, HIDDEN)
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


def keep(m: Any, x: Tensor, wrap: Callable[[Tensor], Any]) -> Tensor:
    m.held = wrap(h := hidden(m, x))
    return m.down(h)


PLACES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "attribute": (lambda h: h, lambda held: held),
    "deque": (lambda h: deque([h], maxlen=2), lambda held: held[0]),
    "generator": (lambda h: (t for t in [h]), next),
    "closure": (lambda h: lambda: h, lambda held: held()),
}
for _name, (_wrap, _of) in PLACES.items():
    USES[f"hidden in a {_name}"] = Use(
        made_of(lambda m, x, wrap=_wrap: keep(m, x, wrap)),
        lambda m, x, of=_of: (mse(m(x)) + of(m.held).sin().mean()).backward(),
    )


class Pair(NamedTuple):
    y: Tensor
    h: Tensor


CONTAINERS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "dict": (lambda y, h: {"y": y, "h": h}, lambda r: r.values()),
    "named tuple": (Pair, tuple),
    "nested": (lambda y, h: {"a": [y, {"h": (h,)}]}, lambda r: (r["a"][0], r["a"][1]["h"][0])),
    "distribution": (
        lambda y, h: torch.distributions.Normal(y, y.exp()),
        lambda r: (r.log_prob(torch.ones(OUT, dtype=torch.float64)),),
    ),
    "views": (lambda y, h: (y.expand(3, ROWS, OUT), h[:, :2]), tuple),
}
for _name, (_pack, _of) in CONTAINERS.items():
    USES[f"results in a {_name}"] = Use(
        made_of(lambda m, x, pack=_pack: pack(m.down(h := hidden(m, x)), h)),
        lambda m, x, of=_of: sum(map(mse, of(m(x)))).backward(),
    )


# Hooks


def flat(value: Any) -> list[Tensor]:
    """The tensors in tuples, lists and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [t for item in value for t in flat(item)]
    return [value] if isinstance(value, Tensor) else []


def after(layer: nn.Module, change: Callable[[Tensor], Any]) -> Any:
    """A forward hook: changes the result of a layer, or leaves it if that is None."""
    return layer.register_forward_hook(lambda _m, _a, y: change(y))


def small(g: Tensor) -> Tensor:
    return g.clamp(-1e-3, 1e-3)


HOOKS: dict[str, Callable[[Any, list[Tensor]], Any]] = {
    "forward": lambda m, seen: after(m.up, torch.cos),
    "forward, that writes": lambda m, seen: after(m.up, lambda y: y.mul_(0.5)),
    "forward, before": lambda m, seen: m.down.register_forward_pre_hook(lambda _m, a: a[0].cos()),
    "forward, of all": lambda m, seen: nn.modules.module.register_module_forward_hook(
        lambda m, _a, y: 0.5 * y if isinstance(m, nn.Linear) else None
    ),
    "backward": lambda m, seen: m.up.register_full_backward_hook(
        lambda _m, i, o: seen.extend(flat((i, o)))
    ),
    "backward, that scales": lambda m, seen: m.down.register_full_backward_hook(
        lambda _m, i, o: (0.1 * i[0],)
    ),
    "tensor, that clips": lambda m, seen: after(m.up, lambda y: y.register_hook(small) and None),
    "parameter": lambda m, seen: m.up.weight.register_hook(small),
    "parameter, after": lambda m, seen: m.up.weight.register_post_accumulate_grad_hook(
        lambda p: seen.append(p.grad.clone())
    ),
}


def hooked(m: Any, x: Tensor, register: Callable[[Any, list[Tensor]], Any]) -> Any:
    seen: list[Tensor] = []
    handle = register(m, seen)
    step(m, x)
    handle.remove()
    return seen


for _name, _register in HOOKS.items():
    USES[f"hook, {_name}"] = Use(mlp, lambda m, x, r=_register: hooked(m, x, r))


@use()
def hooks_of_saved_tensors(m: Any, x: Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        y = m(x)
    mse(y).backward()


# torch.func, and gradients of gradients


def of_weights(m: Any, x: Tensor) -> Callable[[dict[str, Tensor]], Tensor]:
    return lambda p: mse(functional_call(m, p, (x,)))


def parameters(m: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in m.named_parameters()}


FUNCTIONS: dict[str, Callable[[Any, Tensor], Any]] = {
    "jvp": lambda m, x: jvp(m, (x,), (x.cos(),)),
    "jacrev": lambda m, x: jacrev(m)(x[0]),
    "jacfwd": lambda m, x: jacfwd(m)(x[0]),
    "hessian": lambda m, x: hessian(lambda x: mse(m(x)))(x[0]),
    "grad": lambda m, x: grad(of_weights(m, x))(parameters(m)),
    "vmap": lambda m, x: vmap(m)(x),
    "vmap of grad": lambda m, x: vmap(lambda x: grad(of_weights(m, x))(parameters(m)))(x),
    "batched": lambda m, x: torch.autograd.grad(
        m(x), m.down.weight, torch.eye(24).double().view(-1, ROWS, OUT), is_grads_batched=True
    ),
}
for _name, _of in FUNCTIONS.items():
    USES[f"func, {_name}"] = Use(mlp, lambda m, x, of=_of: of(m, x.detach()), called=True)


@use()
def penalty_of_gradients(m: Any, x: Tensor) -> Any:
    loss, weights = mse(m(x)), [m.up.weight, m.down.weight]
    grads = torch.autograd.grad(loss, weights, create_graph=True)
    (loss + sum(g.square().sum() for g in grads)).backward(retain_graph=True)
    product = sum((g * w.detach()).sum() for g, w in zip(grads, weights, strict=True))
    return torch.autograd.grad(product, weights)  # with the Hessian


# Recurrence and training


def _cell(m: Any, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    x, state = given
    state = torch.tanh(m.up(x) + m.dot(state, m.weight))
    return m.down(state), state


@use(made_of(_cell))
def through_time(m: Any, x: Tensor) -> Any:
    state, loss = torch.zeros(ROWS, HIDDEN, dtype=x.dtype), 0.0
    for number in range(5):
        y, state = m((x, state))
        loss = loss + mse(y)
        if number == 1:  # truncated
            state = state.detach()
    loss.backward()


def train(m: Any, x: Tensor) -> Any:
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        step(m, x.detach())
        optimizer.step()
    return list(m.parameters())


@use()
def copies_before_and_after(m: Any, x: Tensor) -> Any:
    """A moving average, a teacher, and a copy that is trained."""
    average, mean, teacher = copy.deepcopy(m), AveragedModel(m), copy.deepcopy(m)
    for _ in range(2):
        train(m, x)
        mean.update_parameters(m)
    with torch.no_grad():
        for a, p in zip(average.parameters(), m.parameters(), strict=True):
            a.lerp_(p, 0.5)
    later = copy.deepcopy(m)
    train(later, x)
    (m(x) - teacher.requires_grad_(False)(x)).square().mean().backward()
    return average(x), mean(x), teacher(x), later(x)


def pair() -> nn.Module:
    parts = {
        "a": nn.Sequential(nn.Linear(IN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, IN)),
        "b": nn.Sequential(nn.Linear(IN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)),
    }
    return Net(lambda m, x: m.b(m.a(x)), **parts)


@use(pair, called=True)
def actor_and_critic(m: Any, x: Tensor) -> Any:
    """The gradient with respect to the action, as in DDPG."""
    mse(m.b(x)).backward()
    (slope,) = torch.autograd.grad(m.b(action := m.a(x)).mean(), action)
    action.backward(-slope)
    return slope


@use(pair, called=True)
def part_of_another_model(m: Any, x: Tensor) -> Any:
    other = nn.Sequential(m.a, nn.Linear(IN, OUT).double())
    nn.init.constant_(other[1].weight, 0.1)
    (mse(other(x)) + mse(m.b(m.a(x)))).backward()
    return other[1].weight.grad


@use(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(IN, IN), nn.Tanh()) for _ in range(3))))
def checkpoints_around(m: Any, x: Tensor) -> Any:
    for reentrant in (False, True):
        mse(checkpoint(m, x, use_reentrant=reentrant)).backward()
        mse(checkpoint(m[1], m[0](x), use_reentrant=reentrant)).backward()
        mse(checkpoint_sequential(m, 2, x, use_reentrant=reentrant)).backward()


@use()
def scaled_losses(m: Any, x: Tensor) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(mse(m(x))).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(m.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
    return list(m.parameters())


@use()
def edits_between_steps(m: Any, x: Tensor) -> Any:
    train(m, x)
    m.up = nn.Sequential(nn.Identity(), m.up)
    m.fn = lambda m, x: m.down(hidden(m, x).square())
    train(m, x)
    inner = m.down.forward
    m.down.forward = lambda x: inner(x).sin()
    return train(m, x)


def outcome(use: Use, model: nn.Module) -> dict[str, Tensor]:
    """What a use returns, and all gradients that it leaves."""
    torch.manual_seed(1)
    x = torch.randn(ROWS, IN, dtype=torch.float64, requires_grad=True)
    found = {f"result {i}": t.detach().clone() for i, t in enumerate(flat(use.run(model, x)))}
    grads = {name: p.grad for name, p in [*model.named_parameters(), ("x", x)]}
    return found | {name: g.detach().clone() for name, g in grads.items() if g is not None}


@pytest.mark.parametrize("name", USES)
def test_a_use_of_a_transformed_model_is_that_of_a_plain_one(name: str) -> None:
    use = USES[name]
    torch.manual_seed(0)
    plain = use.make().double()
    model = unit_scale(plain)
    twin = copy.deepcopy(model)  # set in the first call of the model
    if use.called:
        model(torch.randn(ROWS, IN, dtype=torch.float64))
    ours = outcome(use, model)
    plain.load_state_dict(twin.state_dict(), strict=True)
    theirs = outcome(use, plain)
    assert ours.keys() == theirs.keys()
    assert any(t.any() for t in theirs.values())
    for key, value in theirs.items():
        # Sums of a product depend on where its operands lie in memory.
        assert (ours[key] - value).norm() <= 1e-12 * value.norm() + 1e-15, key
