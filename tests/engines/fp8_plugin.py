"""The plugin of docs/codebases.md for axolotl."""

from axolotl.integrations.base import BasePlugin

import fp8


class FP8Plugin(BasePlugin):
    def pre_lora_load(self, cfg, model):
        fp8.convert(model, "tensor")
