"""Names of torch.nn and torch.nn.functional that `unit_scaling` lacks: what to use instead."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from typing import NoReturn

from torch import nn
from torch.nn import functional as F

#: What to use -> modules, and functions that are no module; # is 1, 2 and 3. {torch}: the name in
#: torch, {base}: without Lazy, _with_indices and the last underscore, {function}: in lower case.
MISSING = {
    "use {torch}: it only moves numbers": """Identity Flatten Unflatten PixelShuffle PixelUnshuffle
        ChannelShuffle native_channel_shuffle ZeroPad#d ConstantPad#d CircularPad#d ReflectionPad#d
        ReplicationPad#d pad one_hot""",
    "use {torch}: it only holds modules (a stack of residual blocks is a uu.DepthSequential or a "
    "uu.DepthModuleList)": "Module Container Sequential ModuleList ModuleDict DataParallel",
    "use {torch}, of uu.Parameter": "ParameterList ParameterDict",
    "use {torch}: log-probabilities and coordinates have no factor": "LogSoftmax affine_grid",
    "use uu.{base}, with the size of its input": """LazyLinear LazyConv#d LazyConvTranspose#d
        LazyBatchNorm#d LazyInstanceNorm#d""",
    "use uu.unit_scaled(F.{function})": "CELU Hardshrink Softshrink Tanhshrink Threshold",
    "use uu.RNN, uu.LSTM or uu.GRU, for a sequence": "RNNBase RNNCellBase RNNCell LSTMCell GRUCell",
    "use uu.TransformerStack or uu.TransformerDecoder, or {torch} in a model under unit_scale":
        "Transformer TransformerEncoder TransformerEncoderLayer TransformerDecoderLayer",
    "use uu.MultiheadAttention": "multi_head_attention_forward",
    "use a mean of rows of uu.Embedding, times the root of their number": "EmbeddingBag",
    "use uu.LinearReadout and U.cross_entropy": "LinearCrossEntropyLoss linear_cross_entropy",
    "use uu.NLLLoss": "NLLLoss2d",
    "use U.{base} with inplace=True": "relu_ elu_ selu_ leaky_relu_ hardtanh_",
    "use U.{base} with return_indices=True":
        "max_pool#d_with_indices adaptive_max_pool#d_with_indices",
    "use U.softmax(-x, dim)": "Softmin",
    "use U.softmax(x, -3)": "Softmax2d",
    "use U.rms_norm, which gives rows RMS 1, not norm 1": "normalize",
    "use U.einsum('bi,oij,bj->bo', left, weight, (right,))": "Bilinear",
    "use U.conv1d of permuted axes": "conv_tbc",
    "use U.matmul or U.grouped_mm under fp8.autocast": "scaled_mm scaled_grouped_mm",
    "gone: use U.mul(x, U.relu(gate))": "reglu",
    "gone: use uu.LayerNorm of permuted axes": "LayerNorm2d",
    "gone: use torch.{base}, and a factor where its result must have RMS 1":
        "sum mean var std cumsum lerp addcmul",
    "gone: use uu.unit_scaled(torch.{base})": "atan clamp pow",
    "no rule for its gradient: use {torch} of uu.scale.scale_bwd(x, s), where 1/s is its RMS":
        """CTCLoss CosineEmbeddingLoss GaussianNLLLoss HingeEmbeddingLoss MarginRankingLoss
        MultiMarginLoss MultiLabelMarginLoss MultiLabelSoftMarginLoss PoissonNLLLoss SoftMarginLoss
        TripletMarginLoss TripletMarginWithDistanceLoss""",
    "no rule, as it is random: divide the result of {torch} by its RMS":
        "AlphaDropout FeatureAlphaDropout RReLU gumbel_softmax",
    "no rule, as it depends on how alike its inputs are: divide the result of {torch} by its RMS":
        """Upsample UpsamplingBilinear2d UpsamplingNearest2d upsample_bilinear upsample_nearest
        interpolate grid_sample Fold Unfold LPPool#d MaxUnpool#d FractionalMaxPool2d
        FractionalMaxPool3d LocalResponseNorm CrossMapLRN2d CosineSimilarity PairwiseDistance
        pdist""",
    "no rule, as it has weights: use {torch} in a model under unit_scale":
        "PReLU SyncBatchNorm AdaptiveLogSoftmaxWithLoss",
}  # fmt: skip
OTHERWISE = "no rule of this name: use {torch}"

#: Modules whose errors give advice -> what code calls them.
MODULES = {
    "unit_scaling": "uu",
    "unit_scaling.functional": "U",
    "unit_scaling.modules": "uu.modules",
}


def names(row: str) -> list[str]:
    """The names of a row of `MISSING`."""
    found = [name.replace("#", digit) for name in row.split() for digit in "123"]
    return list(dict.fromkeys(found))


def bare_name(name: str) -> str:
    """What the names of a module and of its function have in common: of KLDivLoss and kl_div."""
    return name.replace("_", "").lower().removesuffix("loss")


_TABLE = {bare_name(name): what for what, row in MISSING.items() for name in names(row)}


def _in_torch(name: str) -> str | None:
    module = getattr(nn, name, None)
    if isinstance(module, type) and issubclass(module, nn.Module):
        return f"nn.{name}"
    return f"F.{name}" if inspect.isroutine(getattr(F, name, None)) else None


def advice(name: str) -> str:
    """What to use instead of a name that torch has, or another of `MODULES`; "" for other names."""
    for module, called in MODULES.items():
        if name in sys.modules[module].__all__:
            return f"use {called}.{name}"
    torchs = _in_torch(name)
    base = name.removeprefix("Lazy").removesuffix("_with_indices")
    what = _TABLE.get(bare_name(name)) or _TABLE.get(bare_name(base), OTHERWISE)
    if name.startswith("_") or (torchs is None and "{torch}" in what):
        return ""
    base = base.removesuffix("_")
    return what.format(torch=torchs, base=base, function=base.lower())


def _refuse(module: str, name: str) -> NoReturn:
    what = advice(name)
    raise AttributeError(
        f"module {module!r} has no attribute {name!r}{what and ': '}{what}"
    )


def explain_missing() -> None:
    """Gives `MODULES` a ``__getattr__`` that type checkers do not see: they report such names."""
    for module in MODULES:
        vars(sys.modules[module])["__getattr__"] = partial(_refuse, module)
