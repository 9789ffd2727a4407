"""The variants compared: what is done to the plain model, one row each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import fp8

from .model import GPT
from .settings import Settings


def _plain(model: nn.Module) -> nn.Module:
    return model


def _fp8(model: nn.Module) -> nn.Module:
    from unit_scaling.transforms import simulate_fp8

    return simulate_fp8(model)


class TensorScaledGPT(GPT):
    """A GPT whose products run in FP8 with a power-of-two scale for each tensor."""

    def forward(
        self, idx: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The forward pass of a GPT, under the recipe."""
        with fp8.autocast("tensor"):
            return super().forward(idx, targets)


def _fp8_tensor(model: GPT) -> nn.Module:
    scaled = TensorScaledGPT(model.config)
    scaled.load_state_dict(model.state_dict())
    return scaled


def _fp8_static(model: GPT) -> nn.Module:
    """The layers in FP8 with a power-of-two scale for each operand, which the first training step
    sets; attention in high precision. The scales are part of the state."""
    return fp8.convert(model, "static")


def _unit_scaled(model: GPT) -> nn.Module:
    from unit_scaling.transforms import unit_scale

    config = model.config
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab, (8, config.context), generator=generator)
    return unit_scale(model, batch=(ids, ids))


def _unit_scaled_fp8(model: GPT) -> nn.Module:
    return _fp8(_unit_scaled(model))


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a GPT is trained: `build` makes the model from a plain one.

    `autocast` is the dtype of torch.autocast around the forward pass, None for none.
    `unit_scaled` picks the learning rate: weights of variance 1 need a larger one than weights
    of variance 0.02**2; `lr_mult` is a factor of that rate. `scale_loss` is whether torch's
    GradScaler scales the loss, `scaled` whether the cast of each gradient has a scale of its own.
    """

    label: str
    build: Callable[[GPT], nn.Module] = _plain
    autocast: torch.dtype | None = None
    scale_loss: bool = False
    unit_scaled: bool = False
    scaled: bool = False
    lr_mult: float = 1.0

    def default_lr(self, settings: Settings) -> float:
        """The peak learning rate."""
        return self.lr_mult * (settings.unit_lr if self.unit_scaled else settings.lr)


VARIANTS: dict[str, Variant] = {
    "fp32": Variant(label="FP32"),
    "bf16": Variant(label="BF16", autocast=torch.bfloat16),
    "fp8": Variant(label="FP8 without scales", build=_fp8, lr_mult=0.5),
    "fp8_tensor": Variant(
        label="FP8, scale per tensor", build=_fp8_tensor, scaled=True
    ),
    "fp8_static": Variant(label="FP8, static scales", build=_fp8_static, scaled=True),
    "unit_scaled": Variant(
        label="unit-scaled FP32", build=_unit_scaled, unit_scaled=True, scaled=True
    ),
    "unit_scaled_fp8": Variant(
        label="unit-scaled FP8", build=_unit_scaled_fp8, unit_scaled=True, scaled=True
    ),
    "fp16": Variant(label="FP16, loss not scaled", autocast=torch.float16),
    "fp16_mixed": Variant(
        label="FP16, GradScaler", autocast=torch.float16, scale_loss=True
    ),
    "unit_scaled_fp16": Variant(
        label="unit-scaled FP16",
        build=_unit_scaled,
        autocast=torch.float16,
        unit_scaled=True,
        scaled=True,
    ),
}

DEMO = ("fp32", "bf16", "fp8", "fp8_tensor", "unit_scaled", "unit_scaled_fp8")
"""What a run compares where nothing else is asked for."""

EMULATED = ("DEFAULT", "NO AVX", "AVX2")
"""Instruction sets of CPUs, as torch names them, without bfloat16: on AVX2 a step of "bf16" takes
18 times as long as one of "fp32"."""


def emulates_bfloat16(device: torch.device) -> bool:
    """Whether products in bfloat16 are emulated on the device, which makes them slow."""
    if device.type != "cpu":
        return False
    return torch.backends.cpu.get_cpu_capability() in EMULATED


def by_default(device: torch.device) -> tuple[str, ...]:
    """`DEMO` without the variants that the device emulates."""
    if not emulates_bfloat16(device):
        return DEMO
    return tuple(name for name in DEMO if VARIANTS[name].autocast != torch.bfloat16)


def build_model(
    variant: str, *, vocab: int, settings: Settings, seed: int
) -> nn.Module:
    """The model of `variant`, made from the plain one that `seed` gives all of them."""
    torch.manual_seed(seed)
    return VARIANTS[variant].build(GPT(settings.gpt(vocab)))
