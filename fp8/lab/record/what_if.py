"""What the casts of a recipe that is not in force would lose: one pass of a copy of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...casts.watch import Seen, watch_of
from ...common.copies import training_copy
from ...common.step import (
    Batch,
    Loss,
    call,
    copied,
    differentiate,
    seeded,
    unwrapped,
)
from ...layers.convert import convert
from ...layers.settings import converted
from ...recipes.policy import Policy
from ...recipes.recipe import Recipe
from ...torch_internals.stance import outside_compiler
from ..trace import quiet


def rows_under(
    model: nn.Module, recipe: Policy | Recipe | str, batch: Batch, loss: Loss | None
) -> list[Seen]:
    """The rows of a look at a copy of a converted model under another recipe. The model and the
    random number generators stay as they are. Arguments and errors as of `Recorder.what_if`."""
    model = unwrapped(model)
    names = set(converted(model))
    rows: list[Seen] = []

    def look() -> None:
        # A copy, because a change of recipes would compile the model again and begin its looks
        # anew.
        copy, _, own_loss = training_copy(model, None, loss)
        where: Any = lambda name, layer: name in names  # noqa: E731
        if isinstance(recipe, Policy):
            where = None
        convert(copy, recipe, backend="simulate", where=where)
        watch = watch_of(copy)
        differentiate(copy, call(copy, copied(batch)), own_loss)
        watch.listeners.append(rows.extend)
        watch.read()

    with quiet(), seeded(None), torch.inference_mode(False), torch.enable_grad():
        outside_compiler(look)
    return rows
