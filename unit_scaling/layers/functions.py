"""Modules that are one function, with the arguments of torch.nn: all that has no parameters, and
PReLU.

The first arguments of an activation are ``mult`` and ``constraint``. Losses have torch's value and
the scaled gradient of the sum over examples.
"""

from collections.abc import Callable as _Callable
from typing import Any as _Any

from torch import nn as _nn

from .. import functional as _U
from .scaled import CONSTRAINT as _CONSTRAINT
from .scaled import MULT as _MULT
from .scaled import Activation as _Activation
from .scaled import Constrained as _Constrained
from .scaled import Scaled as _Scaled
from .scaled import Weighted as _Weighted

# All names without a leading underscore are public.

_IN_TRAINING = "; the identity in evaluation mode"


def _module(
    base: type[_Scaled],
    theirs: type[_nn.Module],
    op: _Callable[..., _Any],
    also: str = "",
    **attributes: _Any,
) -> type[_Scaled]:
    """The class of torch's name that calls ``op``: ``class GELU(base, nn.GELU, op=U.gelu)``.

    also: the end of its docstring.
    """
    about = f"`unit_scaling.functional.{op.__name__}` as a module{also}."
    own = {"__doc__": about, "__module__": __name__, **attributes}
    return type(theirs.__name__, (base, theirs), own, op=op)


# Activations

GELU = _module(_Activation, _nn.GELU, _U.gelu)
SiLU = _module(_Activation, _nn.SiLU, _U.silu)
ReLU = _module(_Activation, _nn.ReLU, _U.relu)
ReLU6 = _module(_Activation, _nn.ReLU6, _U.relu6)
LeakyReLU = _module(_Activation, _nn.LeakyReLU, _U.leaky_relu)
ELU = _module(_Activation, _nn.ELU, _U.elu)
SELU = _module(_Activation, _nn.SELU, _U.selu)
CELU = _module(_Activation, _nn.CELU, _U.celu)
Softplus = _module(_Activation, _nn.Softplus, _U.softplus)
Mish = _module(_Activation, _nn.Mish, _U.mish)
Hardswish = _module(_Activation, _nn.Hardswish, _U.hardswish)
Hardsigmoid = _module(_Activation, _nn.Hardsigmoid, _U.hardsigmoid)
Hardtanh = _module(_Activation, _nn.Hardtanh, _U.hardtanh)
Tanh = _module(_Activation, _nn.Tanh, _U.tanh)
Sigmoid = _module(_Activation, _nn.Sigmoid, _U.sigmoid)
Softsign = _module(_Activation, _nn.Softsign, _U.softsign)
LogSigmoid = _module(_Activation, _nn.LogSigmoid, _U.logsigmoid)
Tanhshrink = _module(_Activation, _nn.Tanhshrink, _U.tanhshrink)
Softshrink = _module(_Activation, _nn.Softshrink, _U.softshrink)
Hardshrink = _module(_Activation, _nn.Hardshrink, _U.hardshrink)

# Losses

BCELoss = _module(_Scaled, _nn.BCELoss, _U.binary_cross_entropy)
BCEWithLogitsLoss = _module(_Scaled, _nn.BCEWithLogitsLoss, _U.binary_cross_entropy_with_logits)
CTCLoss = _module(_Scaled, _nn.CTCLoss, _U.ctc_loss)
CosineEmbeddingLoss = _module(_Scaled, _nn.CosineEmbeddingLoss, _U.cosine_embedding_loss)
CrossEntropyLoss = _module(_Scaled, _nn.CrossEntropyLoss, _U.cross_entropy, _first=(_MULT,))
HuberLoss = _module(_Scaled, _nn.HuberLoss, _U.huber_loss)
KLDivLoss = _module(_Scaled, _nn.KLDivLoss, _U.kl_div)
L1Loss = _module(_Scaled, _nn.L1Loss, _U.l1_loss)
MSELoss = _module(_Scaled, _nn.MSELoss, _U.mse_loss)
NLLLoss = _module(_Scaled, _nn.NLLLoss, _U.nll_loss)
SmoothL1Loss = _module(_Scaled, _nn.SmoothL1Loss, _U.smooth_l1_loss)

# Pooling and interpolation

AdaptiveAvgPool1d = _module(_Constrained, _nn.AdaptiveAvgPool1d, _U.adaptive_avg_pool1d)
AdaptiveAvgPool2d = _module(_Constrained, _nn.AdaptiveAvgPool2d, _U.adaptive_avg_pool2d)
AdaptiveAvgPool3d = _module(_Constrained, _nn.AdaptiveAvgPool3d, _U.adaptive_avg_pool3d)
AdaptiveMaxPool1d = _module(_Constrained, _nn.AdaptiveMaxPool1d, _U.adaptive_max_pool1d)
AdaptiveMaxPool2d = _module(_Constrained, _nn.AdaptiveMaxPool2d, _U.adaptive_max_pool2d)
AdaptiveMaxPool3d = _module(_Constrained, _nn.AdaptiveMaxPool3d, _U.adaptive_max_pool3d)
AvgPool1d = _module(_Constrained, _nn.AvgPool1d, _U.avg_pool1d)
AvgPool2d = _module(_Constrained, _nn.AvgPool2d, _U.avg_pool2d)
AvgPool3d = _module(_Constrained, _nn.AvgPool3d, _U.avg_pool3d)
LPPool1d = _module(_Constrained, _nn.LPPool1d, _U.lp_pool1d)
LPPool2d = _module(_Constrained, _nn.LPPool2d, _U.lp_pool2d)
LPPool3d = _module(_Constrained, _nn.LPPool3d, _U.lp_pool3d)
MaxPool1d = _module(_Constrained, _nn.MaxPool1d, _U.max_pool1d)
MaxPool2d = _module(_Constrained, _nn.MaxPool2d, _U.max_pool2d)
MaxPool3d = _module(_Constrained, _nn.MaxPool3d, _U.max_pool3d)
Upsample = _module(_Constrained, _nn.Upsample, _U.interpolate)

# Dropout, gated units and others

AlphaDropout = _module(_Constrained, _nn.AlphaDropout, _U.alpha_dropout, also=_IN_TRAINING)
CosineSimilarity = _module(_Constrained, _nn.CosineSimilarity, _U.cosine_similarity)
Dropout = _module(_Scaled, _nn.Dropout, _U.dropout, also=_IN_TRAINING)
Dropout1d = _module(_Scaled, _nn.Dropout1d, _U.dropout1d, also=_IN_TRAINING)
Dropout2d = _module(_Scaled, _nn.Dropout2d, _U.dropout2d, also=_IN_TRAINING)
Dropout3d = _module(_Scaled, _nn.Dropout3d, _U.dropout3d, also=_IN_TRAINING)
FeatureAlphaDropout = _module(_Constrained, _nn.FeatureAlphaDropout, _U.feature_alpha_dropout)
GLU = _module(_Constrained, _nn.GLU, _U.glu)
LocalResponseNorm = _module(_Scaled, _nn.LocalResponseNorm, _U.local_response_norm)
LogSoftmax = _module(_Scaled, _nn.LogSoftmax, _U.log_softmax)


class PReLU(_Weighted, _nn.PReLU, op=_U.prelu):
    """`unit_scaling.functional.prelu` as a module. The slopes are initialised with ``init``."""

    _last = (_CONSTRAINT,)


Softmax = _module(_Scaled, _nn.Softmax, _U.softmax, _last=(_MULT, _CONSTRAINT))
Softmin = _module(_Scaled, _nn.Softmin, _U.softmin, _last=(_MULT, _CONSTRAINT))
