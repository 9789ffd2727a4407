"""Modules that are one function, with the arguments of torch.nn: all that has no parameters, and
PReLU.

The first arguments of an activation are ``mult`` and ``constraint``. Losses have torch's value and
the scaled gradient of the sum over examples.
"""

from torch import nn as _nn

from .. import functional as _U
from .scaled import CONSTRAINT as _CONSTRAINT
from .scaled import MULT as _MULT
from .scaled import Activation as _Activation
from .scaled import Constrained as _Constrained
from .scaled import Scaled as _Scaled
from .scaled import Weighted as _Weighted

# All names without a leading underscore are public.

# Activations


class GELU(_Activation, _nn.GELU, op=_U.gelu):
    """`unit_scaling.functional.gelu` as a module."""


class SiLU(_Activation, _nn.SiLU, op=_U.silu):
    """`unit_scaling.functional.silu` as a module."""


class ReLU(_Activation, _nn.ReLU, op=_U.relu):
    """`unit_scaling.functional.relu` as a module."""


class ReLU6(_Activation, _nn.ReLU6, op=_U.relu6):
    """`unit_scaling.functional.relu6` as a module."""


class LeakyReLU(_Activation, _nn.LeakyReLU, op=_U.leaky_relu):
    """`unit_scaling.functional.leaky_relu` as a module."""


class ELU(_Activation, _nn.ELU, op=_U.elu):
    """`unit_scaling.functional.elu` as a module."""


class SELU(_Activation, _nn.SELU, op=_U.selu):
    """`unit_scaling.functional.selu` as a module."""


class CELU(_Activation, _nn.CELU, op=_U.celu):
    """`unit_scaling.functional.celu` as a module."""


class Softplus(_Activation, _nn.Softplus, op=_U.softplus):
    """`unit_scaling.functional.softplus` as a module."""


class Mish(_Activation, _nn.Mish, op=_U.mish):
    """`unit_scaling.functional.mish` as a module."""


class Hardswish(_Activation, _nn.Hardswish, op=_U.hardswish):
    """`unit_scaling.functional.hardswish` as a module."""


class Hardsigmoid(_Activation, _nn.Hardsigmoid, op=_U.hardsigmoid):
    """`unit_scaling.functional.hardsigmoid` as a module."""


class Hardtanh(_Activation, _nn.Hardtanh, op=_U.hardtanh):
    """`unit_scaling.functional.hardtanh` as a module."""


class Tanh(_Activation, _nn.Tanh, op=_U.tanh):
    """`unit_scaling.functional.tanh` as a module."""


class Sigmoid(_Activation, _nn.Sigmoid, op=_U.sigmoid):
    """`unit_scaling.functional.sigmoid` as a module."""


class Softsign(_Activation, _nn.Softsign, op=_U.softsign):
    """`unit_scaling.functional.softsign` as a module."""


class LogSigmoid(_Activation, _nn.LogSigmoid, op=_U.logsigmoid):
    """`unit_scaling.functional.logsigmoid` as a module."""


class Tanhshrink(_Activation, _nn.Tanhshrink, op=_U.tanhshrink):
    """`unit_scaling.functional.tanhshrink` as a module."""


class Softshrink(_Activation, _nn.Softshrink, op=_U.softshrink):
    """`unit_scaling.functional.softshrink` as a module."""


class Hardshrink(_Activation, _nn.Hardshrink, op=_U.hardshrink):
    """`unit_scaling.functional.hardshrink` as a module."""


# Losses


class BCELoss(_Scaled, _nn.BCELoss, op=_U.binary_cross_entropy):
    """`unit_scaling.functional.binary_cross_entropy` as a module."""


class BCEWithLogitsLoss(_Scaled, _nn.BCEWithLogitsLoss, op=_U.binary_cross_entropy_with_logits):
    """`unit_scaling.functional.binary_cross_entropy_with_logits` as a module."""


class CTCLoss(_Scaled, _nn.CTCLoss, op=_U.ctc_loss):
    """`unit_scaling.functional.ctc_loss` as a module."""


class CosineEmbeddingLoss(_Scaled, _nn.CosineEmbeddingLoss, op=_U.cosine_embedding_loss):
    """`unit_scaling.functional.cosine_embedding_loss` as a module."""


class CrossEntropyLoss(_Scaled, _nn.CrossEntropyLoss, op=_U.cross_entropy):
    """`unit_scaling.functional.cross_entropy` as a module."""

    _first = (_MULT,)


class HuberLoss(_Scaled, _nn.HuberLoss, op=_U.huber_loss):
    """`unit_scaling.functional.huber_loss` as a module."""


class KLDivLoss(_Scaled, _nn.KLDivLoss, op=_U.kl_div):
    """`unit_scaling.functional.kl_div` as a module."""


class L1Loss(_Scaled, _nn.L1Loss, op=_U.l1_loss):
    """`unit_scaling.functional.l1_loss` as a module."""


class MSELoss(_Scaled, _nn.MSELoss, op=_U.mse_loss):
    """`unit_scaling.functional.mse_loss` as a module."""


class NLLLoss(_Scaled, _nn.NLLLoss, op=_U.nll_loss):
    """`unit_scaling.functional.nll_loss` as a module."""


class SmoothL1Loss(_Scaled, _nn.SmoothL1Loss, op=_U.smooth_l1_loss):
    """`unit_scaling.functional.smooth_l1_loss` as a module."""


# Pooling and interpolation


class AdaptiveAvgPool1d(_Constrained, _nn.AdaptiveAvgPool1d, op=_U.adaptive_avg_pool1d):
    """`unit_scaling.functional.adaptive_avg_pool1d` as a module."""


class AdaptiveAvgPool2d(_Constrained, _nn.AdaptiveAvgPool2d, op=_U.adaptive_avg_pool2d):
    """`unit_scaling.functional.adaptive_avg_pool2d` as a module."""


class AdaptiveAvgPool3d(_Constrained, _nn.AdaptiveAvgPool3d, op=_U.adaptive_avg_pool3d):
    """`unit_scaling.functional.adaptive_avg_pool3d` as a module."""


class AdaptiveMaxPool1d(_Constrained, _nn.AdaptiveMaxPool1d, op=_U.adaptive_max_pool1d):
    """`unit_scaling.functional.adaptive_max_pool1d` as a module."""


class AdaptiveMaxPool2d(_Constrained, _nn.AdaptiveMaxPool2d, op=_U.adaptive_max_pool2d):
    """`unit_scaling.functional.adaptive_max_pool2d` as a module."""


class AdaptiveMaxPool3d(_Constrained, _nn.AdaptiveMaxPool3d, op=_U.adaptive_max_pool3d):
    """`unit_scaling.functional.adaptive_max_pool3d` as a module."""


class AvgPool1d(_Constrained, _nn.AvgPool1d, op=_U.avg_pool1d):
    """`unit_scaling.functional.avg_pool1d` as a module."""


class AvgPool2d(_Constrained, _nn.AvgPool2d, op=_U.avg_pool2d):
    """`unit_scaling.functional.avg_pool2d` as a module."""


class AvgPool3d(_Constrained, _nn.AvgPool3d, op=_U.avg_pool3d):
    """`unit_scaling.functional.avg_pool3d` as a module."""


class LPPool1d(_Constrained, _nn.LPPool1d, op=_U.lp_pool1d):
    """`unit_scaling.functional.lp_pool1d` as a module."""


class LPPool2d(_Constrained, _nn.LPPool2d, op=_U.lp_pool2d):
    """`unit_scaling.functional.lp_pool2d` as a module."""


class LPPool3d(_Constrained, _nn.LPPool3d, op=_U.lp_pool3d):
    """`unit_scaling.functional.lp_pool3d` as a module."""


class MaxPool1d(_Constrained, _nn.MaxPool1d, op=_U.max_pool1d):
    """`unit_scaling.functional.max_pool1d` as a module."""


class MaxPool2d(_Constrained, _nn.MaxPool2d, op=_U.max_pool2d):
    """`unit_scaling.functional.max_pool2d` as a module."""


class MaxPool3d(_Constrained, _nn.MaxPool3d, op=_U.max_pool3d):
    """`unit_scaling.functional.max_pool3d` as a module."""


class Upsample(_Constrained, _nn.Upsample, op=_U.interpolate):
    """`unit_scaling.functional.interpolate` as a module."""


# Dropout, gated units and others


class AlphaDropout(_Constrained, _nn.AlphaDropout, op=_U.alpha_dropout):
    """`unit_scaling.functional.alpha_dropout` as a module; the identity in evaluation mode."""


class CosineSimilarity(_Constrained, _nn.CosineSimilarity, op=_U.cosine_similarity):
    """`unit_scaling.functional.cosine_similarity` as a module."""


class Dropout(_Scaled, _nn.Dropout, op=_U.dropout):
    """`unit_scaling.functional.dropout` as a module; the identity in evaluation mode."""


class Dropout1d(_Scaled, _nn.Dropout1d, op=_U.dropout1d):
    """`unit_scaling.functional.dropout1d` as a module; the identity in evaluation mode."""


class Dropout2d(_Scaled, _nn.Dropout2d, op=_U.dropout2d):
    """`unit_scaling.functional.dropout2d` as a module; the identity in evaluation mode."""


class Dropout3d(_Scaled, _nn.Dropout3d, op=_U.dropout3d):
    """`unit_scaling.functional.dropout3d` as a module; the identity in evaluation mode."""


class FeatureAlphaDropout(_Constrained, _nn.FeatureAlphaDropout, op=_U.feature_alpha_dropout):
    """`unit_scaling.functional.feature_alpha_dropout` as a module."""


class GLU(_Constrained, _nn.GLU, op=_U.glu):
    """`unit_scaling.functional.glu` as a module."""


class LocalResponseNorm(_Scaled, _nn.LocalResponseNorm, op=_U.local_response_norm):
    """`unit_scaling.functional.local_response_norm` as a module."""


class LogSoftmax(_Scaled, _nn.LogSoftmax, op=_U.log_softmax):
    """`unit_scaling.functional.log_softmax` as a module."""


class PReLU(_Weighted, _nn.PReLU, op=_U.prelu):
    """`unit_scaling.functional.prelu` as a module. The slopes are initialised with ``init``."""

    _last = (_CONSTRAINT,)


class Softmax(_Scaled, _nn.Softmax, op=_U.softmax):
    """`unit_scaling.functional.softmax` as a module."""

    _last = (_MULT, _CONSTRAINT)


class Softmin(_Scaled, _nn.Softmin, op=_U.softmin):
    """`unit_scaling.functional.softmin` as a module."""

    _last = (_MULT, _CONSTRAINT)
