"""`unit_scale`: sets the values of a model's parameters by unit scaling; its report."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fp8.common.report import Report, Row
from fp8.common.step import Batch, arguments, unwrapped
from fp8.common.validation import check_module
from fp8.layers.convert import choose_recipes

from ..checks.trained import warn_if_trained
from ..parameter import tags_of
from .compile import M, copied
from .install import install, is_sharded
from .replace import Replace, Replacements, checked
from .simulate import resimulate
from .values.parameters import refuse_weights
from .values.pending import REPORTS, is_pending, is_unit_scaled, pend, set_values


def unit_scale(
    module: M,
    replace: Replacements | None = None,
    *,
    batch: Batch | None = None,
) -> M:
    """Returns a unit-scaled copy of ``module``: a plain model, whose parameters are multiplied by
    numbers such that activations have RMS 1 at initialization.

    Classes, graph, hooks, buffers and state_dict are those of ``module``, and
    `unit_scaling.optim` has the learning rates of its parameters. `unit_scaling.report` shows what
    was done.

    With ``batch`` the values are set at once. Without it they are set in the first call of the
    model, or of a copy made before, for all of them; until then they are plain, and a hook is on
    each module. What was written in between is kept, with a warning
    (`fp8.warnings.ScaleWarning`) where the model is then not unit-scaled, as there is where a part
    of the model runs before it has run as a whole.

    Warns (`fp8.warnings.ConvertWarning`) for a trained model, whose function is not kept: use
    ``fp8.convert(model, "static")`` for that.

    Args:
        module: the model; it is not changed, unless processes have divided it (`fully_shard`,
            `parallelize_module`): such a model has no copy and is transformed in place.
        replace: maps torch functions to functions with the same arguments to call instead, e.g.
            {F.relu: U.relu_squared}. A function without an ``inplace`` argument is called without
            it; its result is copied to where the original would write. They are no numbers: the
            forward passes of the model run under a mode that calls them.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments
            of the model, which runs on copies of it, in its mode.

    Returns:
        The copy. Without ``batch``, its first call raises RuntimeError inside `torch.export`,
        `torch.vmap` or `torch.func.functional_call`, and in a graph compiled with
        ``fullgraph=True``.

    Raises:
        TypeError: ``module`` is not an `nn.Module` or is TorchScript, or a replacement is not
            callable.
        ValueError: a replacement is for something other than a torch function, a hook computes a
            weight (`torch.nn.utils.weight_norm`), the model is unit-scaled already, or a number is
            not finite. The latter is raised in the first call without ``batch``.
    """
    check_module("unit_scale", module)
    functions = checked(replace)
    refuse_weights(module)
    if is_unit_scaled(module):
        raise ValueError(
            "unit_scale: the model is unit-scaled already: transform the plain model"
        )
    warn_if_trained(unwrapped(module))
    if any(hasattr(part, "summon_full_params") for part in module.modules()):
        raise ValueError(
            "unit_scale: FullyShardedDataParallel has flattened the parameters, whose shapes "
            "decide on their values: call unit_scale before it, or use fully_shard"
        )
    # A model that processes have divided has no copy.
    result = module if is_sharded(module) else copied(module, "unit_scale")
    inner = unwrapped(result)
    if functions:
        install(inner, Replace(functions))
    if batch is None:
        pend(inner)
    else:
        set_values(inner, arguments(batch))
    choose_recipes(inner)
    resimulate(inner)
    return result


def report(model: nn.Module) -> Report[Row]:
    """Reports what `unit_scale` did to each parameter of a model, and why.

    Args:
        model: a model of `unit_scale`, whose values are set. A later copy of it has rows with the
            numbers alone, which are in the tags of its parameters.

    Returns:
        Rows with ``path`` (of the module), ``what`` (the parameter's name in it), ``done`` and
        ``why``: the factor, and the RMS of the result of the product that reads the parameter.
        ``done`` is "scaled", "set to zero", "keeps its values", "unchanged" or "left alone"; rows
        of the latter may be of calls, whose size no parameter holds.

    Raises:
        TypeError: ``model`` is not an `nn.Module`.
        ValueError: the model is not one of `unit_scale`.
    """
    check_module("report", model)
    inner = unwrapped(model)
    if inner in REPORTS:
        return REPORTS[inner]
    if is_pending(inner):
        note = "The model has not run yet: its values are set in its first call."
        return Report([], [note], heading="parameter")
    if not is_unit_scaled(inner):
        raise ValueError(
            f"report needs a model of unit_scale, got a {type(model).__name__}"
        )
    note = (
        "This is a copy: it has the numbers of its parameters, and no sizes of results."
    )
    return Report(list(_rows_of_tags(inner)), [note], heading="parameter")


def _rows_of_tags(model: nn.Module) -> Iterator[Row]:
    for name, parameter in model.named_parameters():
        tags = tags_of(parameter)
        path, _, leaf = name.rpartition(".")
        if tags.mup_divisor:
            why = f"multiplied by {tags.mup_scale / tags.mup_divisor:.4g}"
            yield Row(path, leaf, "scaled", why)
