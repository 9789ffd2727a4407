"""Modules that know the tags of their parameters."""

from __future__ import annotations

from torch import nn

from ..parameter import MupType, has_parameter_data, tag

__all__ = ["TaggedModule"]


class TaggedModule(nn.Module):
    """A module whose parameters get their tags back when others take their place.

    A parameter that is assigned (``layer.weight = nn.Parameter(...)``,
    ``load_state_dict(assign=True)``) or made anew (``to_empty`` of a module on the meta device,
    then ``reset_parameters``, as is usual) comes without tags. It is tagged as the one before it.
    """

    #: Name of a parameter -> its mup_type and mup_scaling_depth.
    mup_tags: dict[str, tuple[MupType, int | None]]

    def tag_parameters(self, **types: MupType) -> None:
        """Tags the parameters of these names, as far as the module has them."""
        self.mup_tags = {name: (mup_type, None) for name, mup_type in types.items()}
        self.restore_tags()

    def restore_tags(self) -> None:
        """Tags every parameter that has lost its tags."""
        for name, parameter in self.named_parameters(recurse=False):
            self._restore_tag(name, parameter)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        if param is not None:
            self._restore_tag(name, param)

    def _restore_tag(self, name: str, parameter: nn.Parameter) -> None:
        tags = getattr(self, "mup_tags", {})
        if name in tags and not has_parameter_data(parameter):
            tag(parameter, *tags[name])
