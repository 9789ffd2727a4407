"""The models that `benchmarks.gpu` measures, and the recipes that it measures them under."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fp8
from benchmarks.forecast import OURS, TORCHAO, Block, Readout
from fp8.casts.watch import skip_look
from fp8.common.step import Batch, call, tensors
from fp8.kernels.product import why_not_here
from fp8.lab.hardware import BF16

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Sizes:
    """Sizes of what is measured.

    linear, head: tokens, inputs and outputs. block: batch, length, width, MLP and heads. layers,
    vocabulary: of the model, which has 1.5B parameters. square: of the products whose rate is
    measured. copied: bytes. time: seconds that a stage has. rounds, seconds: of a comparison, in
    which a step is repeated for so long. load: seconds of sustained load before a rate is measured,
    and while it is.
    """

    linear: tuple[int, int, int] = (65536, 1664, 6656)
    head: tuple[int, int, int] = (65536, 768, 32768)
    block: tuple[int, int, int, int, int] = (2, 2048, 2048, 5632, 16)
    layers: int = 26
    vocabulary: int = 32768
    square: int = 8192
    copied: int = 4 << 30
    time: float = 60.0
    rounds: int = 12
    seconds: float = 0.03
    load: float = 1.0

    @staticmethod
    def small() -> Sizes:
        """Sizes that show that the stages run."""
        return Sizes(
            linear=(64, 32, 64),
            head=(64, 32, 64),
            block=(1, 16, 32, 64, 2),
            layers=2,
            vocabulary=64,
            square=64,
            copied=1 << 12,
            rounds=2,
            seconds=0.0,
            load=0.0,
        )


class Case:
    """A model and its batch. The backward pass of an output that is no loss begins with a gradient
    of normal numbers."""

    def __init__(self, name: str, model: nn.Module, batch: Batch, device: str) -> None:
        self.name, self.device = name, device
        self.model = model.to(device, DTYPE)
        self.batch = batch
        self._grad: Tensor | None = None

    @classmethod
    def of(cls, name: str, sizes: Sizes, device: str) -> Case:
        """The case of a name in MODELS, with the same numbers each time."""
        torch.manual_seed(0)
        with torch.device(device):
            model, batch = MODELS[name](sizes)
        return cls(name, model, batch, device)

    def step(self, model: nn.Module) -> None:
        """Forward and backward; it is not waited for."""
        output = call(model, self.batch)
        if output.dim():
            if self._grad is None:
                self._grad = torch.randn_like(output)
            output.backward(self._grad)
        else:
            output.backward()
        for tensor in (*model.parameters(), *tensors(self.batch)):
            tensor.grad = None

    def variant(self, recipe: str) -> nn.Module:
        """`converted`, and compiled."""
        model = self.converted(recipe)
        backend = "inductor" if self.device == "cuda" else "eager"
        for part in model.parts() if isinstance(model, Decoder) else [model]:
            part.compile(backend=backend, fullgraph=True, dynamic=False)
        return model

    def converted(self, recipe: str) -> nn.Module:
        """A copy under a recipe that shares the parameters."""
        shared = {id(x): x for x in (*self.model.parameters(), *self.model.buffers())}
        model = copy.deepcopy(self.model, shared)
        if recipe.startswith("torchao "):
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            config = Float8LinearConfig.from_recipe_name(
                recipe.removeprefix("torchao ")
            )
            model = convert_to_float8_training(model, config=config)
        elif recipe != BF16:
            model = fp8.convert(model, recipe, backend="native")
            if fp8.RECIPES[recipe].keeps_history and fp8.RECIPES[recipe].fixed:
                fp8.calibrate(model, self.batch)
            skip_look(model)
        return model


class Decoder(nn.Module):
    """Tokens, (batch, length), to the mean cross entropy of the next ones."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        _, _, width, inner, heads = sizes.block
        self.tokens = nn.Embedding(sizes.vocabulary, width)
        self.blocks = nn.ModuleList(
            Block(width, inner, heads) for _ in range(sizes.layers)
        )
        self.readout = Readout(width, sizes.vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.readout(x, ids)

    def parts(self) -> list[nn.Module]:
        """What is compiled alone. Blocks share a graph."""
        return [*self.blocks, self.readout]


class Layer(nn.Module):
    """A linear layer alone: the compiler skips the code of torch's own modules."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def linear(sizes: tuple[int, int, int], needs_grad: bool) -> tuple[nn.Module, Tensor]:
    tokens, inputs, outputs = sizes
    x = torch.randn(tokens, inputs, dtype=DTYPE)
    return Layer(inputs, outputs).to(DTYPE), x.requires_grad_(needs_grad)


def block(sizes: Sizes) -> tuple[nn.Module, Tensor]:
    batch, length, width, inner, heads = sizes.block
    x = torch.randn(batch, length, width, dtype=DTYPE)
    return Block(width, inner, heads).to(DTYPE), x.requires_grad_()


def readout(sizes: Sizes) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    batch, length, width, *_ = sizes.block
    x = torch.randn(batch, length, width, dtype=DTYPE).requires_grad_()
    ids = torch.randint(sizes.vocabulary, (batch, length))
    return Readout(width, sizes.vocabulary).to(DTYPE), (x, ids)


def decoder(sizes: Sizes) -> tuple[nn.Module, Tensor]:
    return Decoder(sizes), torch.randint(sizes.vocabulary, sizes.block[:2])


MODELS: dict[str, Callable[[Sizes], tuple[nn.Module, Any]]] = {
    "linear": lambda sizes: linear(sizes.linear, False),
    "head": lambda sizes: linear(sizes.head, True),
    "block": block,
    "readout": readout,
    "model": decoder,
}
"""Case -> its model and batch."""


def ours(device: str) -> list[str]:
    """The recipes whose products kernels of the device compute, the ones of `benchmarks.forecast`
    first."""
    where = torch.device(device)
    names = dict.fromkeys((*OURS, *fp8.RECIPES))
    return [n for n in names if not why_not_here(fp8.RECIPES[n], where, DTYPE)]


def recipes(theirs: bool, device: str) -> list[str]:
    """Ours, or torchao's, if that is installed.

    They run in different processes: torchao's conversion changes how inductor compiles for the
    whole process (torchao/float8/_inductor_patch.py), by which our kernels had 5 to 44 % more
    instructions.
    """
    if not theirs:
        return ours(device)
    return list(TORCHAO) if importlib.util.find_spec("torchao") else []
