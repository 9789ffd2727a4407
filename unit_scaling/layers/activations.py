"""Activations; their arguments are ``mult`` and ``constraint``, followed by those of torch.nn."""

from __future__ import annotations

from torch import nn

from .. import functional as U
from .scaled import Activation

__all__ = [
    "CELU",
    "ELU",
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
    "Sigmoid",
    "Softplus",
    "Softshrink",
    "Softsign",
    "Tanh",
    "Tanhshrink",
]


class ReLU(Activation, nn.ReLU):
    """`unit_scaling.functional.relu` as a module."""

    op = staticmethod(U.relu)


class ReLU6(Activation, nn.ReLU6):
    """`unit_scaling.functional.relu6` as a module."""

    op = staticmethod(U.relu6)


class LeakyReLU(Activation, nn.LeakyReLU):
    """`unit_scaling.functional.leaky_relu` as a module."""

    op = staticmethod(U.leaky_relu)


class ELU(Activation, nn.ELU):
    """`unit_scaling.functional.elu` as a module."""

    op = staticmethod(U.elu)


class SELU(Activation, nn.SELU):
    """`unit_scaling.functional.selu` as a module."""

    op = staticmethod(U.selu)


class CELU(Activation, nn.CELU):
    """`unit_scaling.functional.celu` as a module."""

    op = staticmethod(U.celu)


class Softplus(Activation, nn.Softplus):
    """`unit_scaling.functional.softplus` as a module."""

    op = staticmethod(U.softplus)


class Mish(Activation, nn.Mish):
    """`unit_scaling.functional.mish` as a module."""

    op = staticmethod(U.mish)


class Hardswish(Activation, nn.Hardswish):
    """`unit_scaling.functional.hardswish` as a module."""

    op = staticmethod(U.hardswish)


class Hardsigmoid(Activation, nn.Hardsigmoid):
    """`unit_scaling.functional.hardsigmoid` as a module."""

    op = staticmethod(U.hardsigmoid)


class Hardtanh(Activation, nn.Hardtanh):
    """`unit_scaling.functional.hardtanh` as a module."""

    op = staticmethod(U.hardtanh)


class Tanh(Activation, nn.Tanh):
    """`unit_scaling.functional.tanh` as a module."""

    op = staticmethod(U.tanh)


class Sigmoid(Activation, nn.Sigmoid):
    """`unit_scaling.functional.sigmoid` as a module."""

    op = staticmethod(U.sigmoid)


class Softsign(Activation, nn.Softsign):
    """`unit_scaling.functional.softsign` as a module."""

    op = staticmethod(U.softsign)


class LogSigmoid(Activation, nn.LogSigmoid):
    """`unit_scaling.functional.logsigmoid` as a module."""

    op = staticmethod(U.logsigmoid)


class Tanhshrink(Activation, nn.Tanhshrink):
    """`unit_scaling.functional.tanhshrink` as a module."""

    op = staticmethod(U.tanhshrink)


class Softshrink(Activation, nn.Softshrink):
    """`unit_scaling.functional.softshrink` as a module."""

    op = staticmethod(U.softshrink)


class Hardshrink(Activation, nn.Hardshrink):
    """`unit_scaling.functional.hardshrink` as a module."""

    op = staticmethod(U.hardshrink)
