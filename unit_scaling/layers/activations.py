"""Activations; their arguments are ``mult`` and ``constraint``, followed by those of torch.nn."""

from __future__ import annotations

from torch import nn

from .. import functional as U
from .scaled import Activation

__all__ = [
    "CELU",
    "ELU",
    "GELU",
    "SELU",
    "Hardshrink",
    "Hardsigmoid",
    "Hardswish",
    "Hardtanh",
    "LeakyReLU",
    "LogSigmoid",
    "Mish",
    "ReLU",
    "ReLU6",
    "SiLU",
    "Sigmoid",
    "Softplus",
    "Softshrink",
    "Softsign",
    "Tanh",
    "Tanhshrink",
]


class GELU(Activation, nn.GELU, op=U.gelu):
    """`unit_scaling.functional.gelu` as a module."""


class SiLU(Activation, nn.SiLU, op=U.silu):
    """`unit_scaling.functional.silu` as a module."""


class ReLU(Activation, nn.ReLU, op=U.relu):
    """`unit_scaling.functional.relu` as a module."""


class ReLU6(Activation, nn.ReLU6, op=U.relu6):
    """`unit_scaling.functional.relu6` as a module."""


class LeakyReLU(Activation, nn.LeakyReLU, op=U.leaky_relu):
    """`unit_scaling.functional.leaky_relu` as a module."""


class ELU(Activation, nn.ELU, op=U.elu):
    """`unit_scaling.functional.elu` as a module."""


class SELU(Activation, nn.SELU, op=U.selu):
    """`unit_scaling.functional.selu` as a module."""


class CELU(Activation, nn.CELU, op=U.celu):
    """`unit_scaling.functional.celu` as a module."""


class Softplus(Activation, nn.Softplus, op=U.softplus):
    """`unit_scaling.functional.softplus` as a module."""


class Mish(Activation, nn.Mish, op=U.mish):
    """`unit_scaling.functional.mish` as a module."""


class Hardswish(Activation, nn.Hardswish, op=U.hardswish):
    """`unit_scaling.functional.hardswish` as a module."""


class Hardsigmoid(Activation, nn.Hardsigmoid, op=U.hardsigmoid):
    """`unit_scaling.functional.hardsigmoid` as a module."""


class Hardtanh(Activation, nn.Hardtanh, op=U.hardtanh):
    """`unit_scaling.functional.hardtanh` as a module."""


class Tanh(Activation, nn.Tanh, op=U.tanh):
    """`unit_scaling.functional.tanh` as a module."""


class Sigmoid(Activation, nn.Sigmoid, op=U.sigmoid):
    """`unit_scaling.functional.sigmoid` as a module."""


class Softsign(Activation, nn.Softsign, op=U.softsign):
    """`unit_scaling.functional.softsign` as a module."""


class LogSigmoid(Activation, nn.LogSigmoid, op=U.logsigmoid):
    """`unit_scaling.functional.logsigmoid` as a module."""


class Tanhshrink(Activation, nn.Tanhshrink, op=U.tanhshrink):
    """`unit_scaling.functional.tanhshrink` as a module."""


class Softshrink(Activation, nn.Softshrink, op=U.softshrink):
    """`unit_scaling.functional.softshrink` as a module."""


class Hardshrink(Activation, nn.Hardshrink, op=U.hardshrink):
    """`unit_scaling.functional.hardshrink` as a module."""
