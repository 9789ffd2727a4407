"""The factors of a unit-scaled model, as factors of its weights, for the plain class to serve.

Every value of the transformed model is some number times that of the plain one, its *ratio*. A
linear layer may have any ratio at its output, by a factor of its weight; a norm forgets that of its
input, but for its eps; an activation needs ratio 1. Along the residual stream

    x' = a x + b y,   ratio' = a ratio,   and so the ratio of y is ratio' / b.

Known for decoders that are built as Llama's: norms before attention and a gated MLP.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..ops import OPS
from .record import Key
from .steps import Plan, Step

__all__ = ["Folded", "folded"]

Folded = tuple[dict[str, float], dict[str, float]]
"""Parameter -> the factor that the plain model's has; layer -> the ratio of its input."""

_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def folded(model: Any, plan: Plan) -> Folded:
    """The factors of every weight of ``model``, whose logits the plain class then computes.

    Equal but for the eps of norms, which the plain model adds to squares that are 1/ratio**2 times
    as large: for activations of RMS about 1, a relative difference of eps / 2.
    Raises ValueError for a model that is built otherwise, one whose head is tied to its embedding,
    and a call that scales something besides, by name.
    """
    fold = _Fold(model, plan)
    try:
        layers = list(model.model.layers)
        head, embedding = model.lm_head, model.model.embed_tokens
    except AttributeError as error:
        raise ValueError(f"{_OTHERWISE}: {error}") from error
    if head.weight is embedding.weight:
        raise ValueError(f"{_OTHERWISE}: its head is tied to its embedding")
    fold.take("model.embed_tokens", "embedding")
    ratio = 1.0
    for i in range(len(layers)):
        ratio = fold.layer(f"model.layers.{i}", ratio)
    fold.linear("lm_head", 1.0, 1.0)
    left = [key for key in fold.steps if key[1] != "cross_entropy"]
    if left:
        path, kind, _ = left[0]
        raise ValueError(f"{_OTHERWISE}: {kind} in {path or 'the model itself'} is scaled")
    return fold.factors, fold.inputs


_OTHERWISE = (
    "the factors of unit_scale(init='unit') fold into the weights of decoders built as Llama's, "
    "with scaled_dot_product_attention; init='preserve' has none"
)


class _Fold:
    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.model = model
        self.steps = {key: s for key, s in plan.steps.items() if s is not None and _acts(s)}
        self.factors: dict[str, float] = {}
        self.inputs: dict[str, float] = {}

    def take(self, path: str, kind: str, number: int = 0) -> Step:
        """The step of a call, which counts as seen to."""
        key: Key = (path, kind, number)
        if key not in self.steps:
            raise ValueError(f"{_OTHERWISE}: {path} has no scaled {kind}")
        return self.steps.pop(key)

    def linear(self, path: str, before: float, after: float) -> None:
        """A layer with those ratios of its input and its output."""
        step = self.take(path, "linear")
        weight: Any = self.model.get_parameter(f"{path}.weight")
        given = (torch.empty(1, weight.shape[1], device="meta"), weight)
        own = _output(step, given, func=F.linear)
        self.factors[f"{path}.weight"] = own * before / after
        self.inputs[path] = before
        if self.model.get_submodule(path).bias is not None:
            self.factors[f"{path}.bias"] = own / after

    def layer(self, path: str, ratio: float) -> float:
        """The ratio of the stream after a layer."""
        for part, names, add in (("self_attn", _ATTENTION, 0), ("mlp", _MLP, 1)):
            for name in names:
                self.linear(f"{path}.{part}.{name}", 1.0, 1.0)
            inner = self.attention(path) if add == 0 else self.gate(path)
            step = self.take(path, "add", add)
            by_term = {slot: forward for slot, forward, _ in step.slots}
            ratio *= by_term.get((0,), 1.0)
            output = "o_proj" if add == 0 else "down_proj"
            self.linear(f"{path}.{part}.{output}", inner, ratio / by_term.get((1,), 1.0))
        return ratio

    def attention(self, path: str) -> float:
        """The ratio of what attention returns."""
        step = self.take(f"{path}.self_attn", "scaled_dot_product_attention")
        module: Any = self.model.get_submodule(f"{path}.self_attn")
        heads = torch.empty(1, 1, 1, module.head_dim, device="meta")
        return _output(step, (heads, heads, heads), scale=module.scaling)

    def gate(self, path: str) -> float:
        """The ratio of the gated values."""
        (key,) = [key for key in self.steps if key[0] == f"{path}.mlp.act_fn"]
        value = torch.empty(1, device="meta")
        activated = _output(self.take(*key), (value,))
        return activated * _output(self.take(f"{path}.mlp", "mul"), (value, value))


def _output(step: Step, args: tuple[Any, ...], func: Any = None, **given: Any) -> float:
    """What a step multiplies the result of its call by."""
    if any(forward != 1 for _, forward, _ in step.slots):
        raise ValueError(f"{_OTHERWISE}: an argument of {step.op} is scaled")
    settings = {"constraint": step.constraint, **dict(step.settings), **given}
    return OPS[step.op or ""].scales(args, {}, func=func, **settings)["output"] * step.output[0]


def _acts(step: Step) -> bool:
    """Whether it changes a value, not only gradients."""
    return step.op is not None or step.output[0] != 1 or any(fwd != 1 for _, fwd, _ in step.slots)
