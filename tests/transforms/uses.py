"""Small uses of a model, in a table: what people compute with it and around it."""

from __future__ import annotations

import copy
from collections import deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.transforms.models import ROWS, Net, OfLayer, attention_of_a_graph, own, sparse

IN, HIDDEN, OUT = 8, 16, 4


@dataclass(frozen=True)
class Use:
    """make: the plain model. run: uses a model and an input that requires a gradient, and returns
    tensors to compare besides all gradients. graph: whether it is also tried compiled."""

    make: Callable[[], nn.Module]
    run: Callable[[Any, Tensor], Any]
    graph: bool = False


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


def use(make: Callable[[], nn.Module] = mlp, graph: bool = False) -> Callable[..., Any]:
    def add(run: Callable[[Any, Tensor], Any]) -> Any:
        USES[run.__name__.replace("_", " ")] = Use(make, run, graph)
        return run

    return add


# Weights that a forward computes or changes


@torch.no_grad()
def _divide(w: Tensor) -> None:
    w.div_(w.norm(dim=1, keepdim=True))


WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "normalised": F.normalize,
    "normalised in place": lambda w: (_divide(w), w)[1],
    "standardised": lambda w: (w - w.mean(1, keepdim=True)) / w.std(1, keepdim=True),
    "low rank": lambda w: w + 0.5 * w[:, :2] @ w[:2],
    "in parts": lambda w: torch.cat(w.chunk(2)[::-1]),
}
for _name, _of in WEIGHTS.items():
    _make = made_of(lambda m, x, of=_of: m.down(m.dot(hidden(m, x), of(m.weight))))
    USES[f"weight {_name}"] = Use(_make, step, graph=_name in ("normalised", "in parts"))


def looked(max_norm: float | None, tied: bool) -> nn.Module:
    model = made_of(lambda m, ids: m.down(hidden(m, m.table(ids))))()
    model.table, model.up = nn.Embedding(10, HIDDEN, max_norm=max_norm), nn.Linear(HIDDEN, HIDDEN)
    model.down = nn.Linear(HIDDEN, 10)
    if tied:
        model.down.weight = model.table.weight
    return model


IDS = torch.arange(24).view(4, 6) * 7 % 10

for _name, _options in {"renormed": (0.5, False), "tied": (None, True)}.items():
    USES[f"table, {_name}"] = Use(
        lambda options=_options: looked(*options),
        lambda m, x: F.cross_entropy(m(IDS).flatten(0, 1), IDS.flatten()).backward(),
        graph=True,
    )


def _parametrized(name: str) -> nn.Module:
    model = mlp()
    for layer in (model.up, model.down):
        getattr(parametrizations, name)(layer)
    return model


for _name in ("weight_norm", "spectral_norm", "orthogonal"):
    USES[_name] = Use(lambda name=_name: _parametrized(name), step)


# Losses, with functions of autograd among them


mean_of_squares = own(lambda y: y.square().mean(), lambda g, y: g * 2 * y / y.numel())
clipped = own(lambda y: y.clone(), lambda g, y: g * (1e-2 / g.norm()).clamp(max=1))
with_loss = own(lambda y, loss: y.clone(), lambda g, y, loss: (g, torch.ones_like(loss)))
rounded = own(torch.round, lambda g, y: g)
reverse = own(lambda y: y.clone(), lambda g, y: -0.1 * g)


def balance(m: Any, x: Tensor) -> Tensor:
    return 0.01 * m.up(x).softmax(-1).mean(0).square().sum()


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "penalty": lambda m, x: mse(m(x)) + 0.1 * sum(p.square().sum() for p in m.parameters()),
    "head in parts": lambda m, x: sum(mse(h @ m.down.weight.T) for h in hidden(m, x).chunk(3)),
    "weight read again": lambda m, x: mse(y := m(x)) + mse(y @ m.down.weight),
    "clamped": lambda m, x: m(x).clamp(-0.1, 0.1).square().sum(),
    "written": lambda m, x: m(x).mul_(2).add_(1).square().mean(),
    "part, activated in place": lambda m, x: mse(m.down(F.relu_(m.up(x)))),
    "detached": lambda m, x: mse(m(x)) + mse(m(x.detach()).detach() * m(x)),
    "training and evaluation": lambda m, x: mse(m.train()(x)) + mse(m.eval()(x[:1])),
    "products of parts": lambda m, x: mse(m.up(x) @ m.up(x).mT) + mse(m(x)),
    "complex": lambda m, x: torch.fft.fft(m(x)).abs().square().mean(),
    "function of autograd": lambda m, x: mean_of_squares(m(x)),
    "clip of autograd": lambda m, x: mse(clipped(m(x))),
}
for _name, _loss in LOSSES.items():
    USES[f"loss, {_name}"] = Use(mlp, lambda m, x, f=_loss: f(m, x).backward())

INSIDE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "function of autograd": lambda m, x: mean_of_squares(m.down(hidden(m, x))),
    "clip": lambda m, x: mse(m.down(clipped(hidden(m, x)))),
    "auxiliary loss": lambda m, x: mse(m.down(with_loss(hidden(m, x), balance(m, x)))),
    "straight through": lambda m, x: mse(m.down(rounded(3 * m.up(x)).tanh())),
    "reversed": lambda m, x: mse(m.down(hidden(m, x))) + mse(reverse(m.up(x))),
    "weight and transpose": lambda m, x: mse(
        m.again(m.dot(hidden(m, x), m.weight), m.weight.T).sin()
    ),
    "function of a layer": lambda m, x: mse(OfLayer.apply(hidden(m, x), m.down.weight, m.down)),
    "checkpoint": lambda m, x: mse(m.down(checkpoint(m.up, x, use_reentrant=False).tanh())),
}
for _name, _loss in INSIDE.items():
    USES[f"inside, {_name}"] = Use(made_of(_loss), lambda m, x: m(x).backward(), graph=True)


extension = own(
    lambda x, w: torch.from_numpy(x.detach().numpy() @ w.detach().numpy().T),
    lambda g, x, w: (g @ w, g.mT @ x),
)
sign = own(torch.sign, lambda g, x: g * (x.abs() < 1))


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


#: What no call shows, or a rule is not for.
UNSEEN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "kernel of an extension": lambda m, x: extension(hidden(m, x), m.weight).tanh(),
    "sign": lambda m, x: sign(m.up(x)),
    "sign of a weight": lambda m, x: F.linear(hidden(m, x), sign(10 * m.weight)),
    "writes into views": written_views,
    "vmap of a part": ensemble,
    "adapted by vmap of grad": adapted,
    "sparse, squared": lambda m, x: (
        ((csr := sparse(torch.ones(16, dtype=x.dtype)).to_sparse_csr()) @ csr) @ hidden(m, x)
    ),
    "sparse, learned": lambda m, x: (
        torch.sparse.mm(edges := sparse(m.weight[0]), edges).to_dense() @ hidden(m, x)
    ),
    "sparse, scores": lambda m, x: attention_of_a_graph(hidden(m, x)),
}
for _name, _of in UNSEEN.items():
    USES[f"unseen, {_name}"] = Use(made_of(lambda m, x, of=_of: m.down(of(m, x))), step)


# Hooks


def flat(value: Any) -> list[Tensor]:
    """The tensors in tuples, lists and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [t for item in value for t in flat(item)]
    return [value] if isinstance(value, Tensor) else []


def note(seen: list[Tensor], *values: Any) -> None:
    seen.extend(t.detach().clone() for t in flat(values))


def after(layer: nn.Module, change: Callable[[Tensor], Any]) -> Any:
    """A forward hook: changes the result of a layer, or leaves it if that is None."""
    return layer.register_forward_hook(lambda _m, _a, y: change(y))


def at(layer: nn.Module, hook: Callable[[Tensor], Any]) -> Any:
    """A hook on the tensor that a layer returns."""
    return after(layer, lambda y: y.register_hook(hook) and None)


small = lambda g: g.clamp(-1e-3, 1e-3)  # noqa: E731

HOOKS: dict[str, Callable[[Any, list[Tensor]], Any]] = {
    "forward": lambda m, seen: after(m.up, torch.cos),
    "forward, that clones": lambda m, seen: after(m.up, lambda y: y.clone().relu_()),
    "forward, that writes": lambda m, seen: after(m.up, lambda y: y.mul_(0.5)),
    "forward, before": lambda m, seen: m.down.register_forward_pre_hook(lambda _m, a: a[0].cos()),
    "forward, of all": lambda m, seen: nn.modules.module.register_module_forward_hook(
        lambda m, _a, y: 0.5 * y if isinstance(m, nn.Linear) else None
    ),
    "backward": lambda m, seen: m.up.register_full_backward_hook(lambda _m, i, o: note(seen, i, o)),
    "backward, that scales": lambda m, seen: m.down.register_full_backward_hook(
        lambda _m, i, o: (0.1 * i[0],)
    ),
    "tensor, that clips": lambda m, seen: at(m.up, small),
    "parameter": lambda m, seen: m.up.weight.register_hook(small),
    "parameter, after": lambda m, seen: m.up.weight.register_post_accumulate_grad_hook(
        lambda p: note(seen, p.grad)
    ),
}


def _hooked(m: Any, x: Tensor, register: Callable[[Any, list[Tensor]], Any]) -> Any:
    seen: list[Tensor] = []
    handle = register(m, seen)
    step(m, x)
    handle.remove()
    return seen


for _name, _register in HOOKS.items():
    USES[f"hook, {_name}"] = Use(mlp, lambda m, x, r=_register: _hooked(m, x, r))


@use()
def hooks_of_nodes_and_saved_tensors(m: Any, x: Tensor) -> Any:
    seen: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        y = m(x)
    y.grad_fn.register_prehook(lambda g: note(seen, g))
    mse(y).backward()
    with torch.autograd.graph.save_on_cpu():
        step(m, x)
    return seen


# Hidden values in any place, results in any container


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


Pair = namedtuple("Pair", "y hidden")
PLACES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "attribute": (lambda h: h, lambda held: held),
    "slot": (Slotted, lambda held: held.value),
    "deque": (lambda h: deque([h], maxlen=2), lambda held: held[0]),
    "generator": (lambda h: (t for t in [h]), next),
    "closure": (lambda h: lambda: h, lambda held: held()),
}


def _keep(m: Any, x: Tensor, wrap: Callable[[Tensor], Any]) -> Tensor:
    m.held = wrap(h := hidden(m, x))
    return m.down(h)


for _name, (_wrap, _of) in PLACES.items():
    USES[f"hidden in a {_name}"] = Use(
        made_of(lambda m, x, wrap=_wrap: _keep(m, x, wrap)),
        lambda m, x, of=_of: (mse(m(x)) + of(m.held).sin().mean()).backward(),
    )

CONTAINERS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "tuple": (lambda y, h: (y, h), tuple),
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
        graph=_name in ("tuple", "dict", "views"),
    )


# Leaves and modules that torch does not know


@use(made_of(lambda m, x: m.down((m.up(x) + m.held).tanh())))
def leaf_that_is_no_parameter(m: Any, x: Tensor) -> Any:
    m.held = torch.full((HIDDEN,), 0.1, dtype=torch.float64, requires_grad=True)
    step(m, x)
    return m.held.grad


@use()
def gradients_of_inputs(m: Any, x: Tensor) -> Any:
    (slope,) = torch.autograd.grad(m(x)[:, 1].sum(), x)
    step(m, (x + 0.1 * slope.sign()).detach())  # an adversarial example
    image = torch.zeros_like(x).requires_grad_()
    m.up(image).mean().backward()
    return slope, image.grad, torch.autograd.grad(mse(m(x)), [m.up.weight, m.down.bias, x])


def _listed() -> nn.Module:
    model = made_of(lambda m, x: m.held[1]["down"](m.held[0](x).tanh()))()
    model.held = [model.up, {"down": model.down}]
    return model


USES["modules in a list and a dict"] = Use(_listed, step, graph=True)


# torch.func, and gradients of gradients


def parameters(m: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in m.named_parameters()}


def of_weights(m: Any, x: Tensor) -> Callable[[dict[str, Tensor]], Tensor]:
    return lambda p: mse(functional_call(m, p, (x,)))


FUNCTIONS: dict[str, Callable[[Any, Tensor], Any]] = {
    "jvp": lambda m, x: jvp(m, (x,), (x.cos(),)),
    "jacrev": lambda m, x: jacrev(m)(x[0]),
    "jacfwd": lambda m, x: jacfwd(m)(x[0]),
    "hessian": lambda m, x: hessian(lambda x: mse(m(x)))(x[0]),
    "grad": lambda m, x: grad(of_weights(m, x))(parameters(m)),
    "vmap": lambda m, x: vmap(m)(x),
    "batched": lambda m, x: torch.autograd.grad(
        m(x),
        list(m.parameters())[1:],
        torch.eye(ROWS * OUT).double().view(-1, ROWS, OUT),
        is_grads_batched=True,
    ),
    "vmap of grad": lambda m, x: vmap(lambda x: grad(of_weights(m, x))(parameters(m)))(x),
}
for _name, _of in FUNCTIONS.items():
    USES[f"func, {_name}"] = Use(
        mlp, lambda m, x, of=_of: (m(x.detach()).detach(), of(m, x.detach()))
    )


@use()
def penalty_of_the_slope(m: Any, x: Tensor) -> Any:
    y = m(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (mse(y) + (slope.norm(dim=-1) - 1).square().mean()).backward()


@use()
def penalty_of_gradients(m: Any, x: Tensor) -> Any:
    loss, weights = mse(m(x)), [m.up.weight, m.down.weight]
    grads = torch.autograd.grad(loss, weights, create_graph=True)
    (loss + sum(g.square().sum() for g in grads)).backward(retain_graph=True)
    product = sum((g * w.detach()).sum() for g, w in zip(grads, weights, strict=True))
    return torch.autograd.grad(product, weights)  # with the Hessian


def _force(m: Any, x: Tensor) -> Tensor:
    x = x if x.requires_grad else x.clone().requires_grad_()
    return torch.autograd.grad(m.down(hidden(m, x)).sum(), x, create_graph=True)[0]


def _backward(m: Any, x: Tensor) -> Tensor:
    mse(y := m.down(hidden(m, x))).backward()
    return y.detach()


USES["gradient inside"] = Use(made_of(_force), step)
USES["backward inside"] = Use(made_of(_backward), lambda m, x: m(x))


# Recurrence and training


def _cell(m: Any, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    x, state = given
    state = torch.tanh(m.up(x) + m.dot(state, m.weight))
    return m.down(state), state


@use(made_of(_cell), graph=True)
def through_time(m: Any, x: Tensor) -> Any:
    state, loss = torch.zeros(ROWS, HIDDEN, dtype=x.dtype), 0.0
    for number in range(5):
        y, state = m((x, state))
        loss = loss + mse(y)
        if number == 1:  # truncated
            state = state.detach()
    loss.backward()


@use()
def accumulation_with_factors(m: Any, x: Tensor) -> Any:
    for factor, part in zip((1.0, 1e3, 1e-4), x.chunk(3), strict=True):
        (factor * mse(m(part))).backward()
    loss = mse(m(x))
    loss.backward(retain_graph=True)
    (3 * loss).backward()


@use()
def loss_scaler(m: Any, x: Tensor) -> Any:
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
    model = nn.Module()
    model.a = nn.Sequential(nn.Linear(IN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, IN))
    model.b = nn.Sequential(nn.Linear(IN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
    return model


@use(pair)
def adversaries(m: Any, x: Tensor) -> Any:
    fake = m.a(x)
    (F.softplus(-m.b(x)).mean() + F.softplus(m.b(fake.detach())).mean()).backward()
    m.b.requires_grad_(False)
    F.softplus(-m.b(fake)).mean().backward()


@use(pair)
def actor_and_critic(m: Any, x: Tensor) -> Any:
    """The gradient with respect to the action, as in DDPG."""
    mse(m.b(x)).backward()
    (slope,) = torch.autograd.grad(m.b(action := m.a(x)).mean(), action)
    action.backward(-slope)
    return slope


@use(pair)
def part_of_another_model(m: Any, x: Tensor) -> Any:
    other = nn.Sequential(m.a, nn.Linear(IN, OUT).double())
    nn.init.constant_(other[1].weight, 0.1)
    (mse(other(x)) + mse(m.b(m.a(x)))).backward()
    return other[1].weight.grad


@use(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(IN, IN), nn.Tanh()) for _ in range(3))))
def checkpoints(m: Any, x: Tensor) -> Any:
    for reentrant in (False, True):
        mse(checkpoint(m[1], m[0](x), use_reentrant=reentrant)).backward()
        mse(checkpoint(m, x, use_reentrant=reentrant)).backward()
        mse(checkpoint_sequential(m, 2, x, use_reentrant=reentrant)).backward()


@use()
def edits_between_steps(m: Any, x: Tensor) -> Any:
    m.up = nn.Sequential(m.up)
    train(m, x)
    m.up = nn.Sequential(nn.Identity(), m.up)
    m.fn = lambda m, x: m.down(hidden(m, x).square())
    train(m, x)
    inner = m.down.forward
    m.down.forward = lambda x: inner(x).sin()
    return train(m, x)


@use()
def without_gradients_first(m: Any, x: Tensor) -> Any:
    with torch.no_grad():
        m(x)
    with torch.inference_mode():
        m(x)
    step(m, x)
