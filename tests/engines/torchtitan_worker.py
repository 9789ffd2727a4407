"""torchtitan's Trainer on the CPU: ``python torchtitan_worker.py FOLDER CASE``, losses as JSON.

torchtitan 0.3 trains on accelerators, with a torch after 2.13. What is put in place here: its name
of the device, functions of devices that `torch.cpu` lacks, `torch.distributed.set_timeout` where
torch has none, and the attention that its own tests use where FlexAttention has no backward pass.
All else is torchtitan's: the models, their sharding by FSDP2, the loop.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch._utils
import torch.distributed
from torch.nn import functional as F

torch._utils._get_available_device_type = lambda: "cpu"  # before torchtitan asks
torch.cpu.current_device = lambda: 0
torch.cpu.get_device_name = lambda device=None: "cpu"
torch.cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=1)
torch.cpu.memory_stats = lambda device=None: {}
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None
if not hasattr(torch.distributed, "set_timeout"):  # torch 2.13
    torch.distributed.set_timeout = lambda timeout, group: None

from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from torchtitan.models import deepseek_v3, llama3  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

import fp8  # noqa: E402
from fp8.adapters.torchtitan import FP8Converter  # noqa: E402

POLICIES = {
    "llama": fp8.Policy("tensor", rules=[("lm_head", None, None)]),
    "deepseek": fp8.Policy(
        "tensor", rules=[("lm_head", None, None), ("*.router.gate", None, None)]
    ),
}
STEPS = 4


def assets(folder):
    """A tokenizer of bytes, and a text."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {name: i for i, name in enumerate([*names, "<s>", "</s>"])}
    made = Tokenizer(models.BPE(vocab=ids, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.save(str(folder / "tokenizer.json"))
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(ends))
    (folder / "data").mkdir()
    lines = [json.dumps({"text": f"after {i} comes {i + 1}, " * 8}) for i in range(200)]
    (folder / "data" / "data.json").write_text("\n".join(lines))


def config_of(name, folder, converters):
    """The debug configuration of torchtitan's own registry, with small batches."""
    make = {"llama": llama3_debugmodel, "deepseek": deepseek_v3_debugmodel}[name]
    registry = {"llama": llama3, "deepseek": deepseek_v3}[name].model_registry
    config = make()
    config.model_spec = registry("debugmodel", converters=converters)
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.training.steps, config.training.seq_len, config.training.local_batch_size = (
        STEPS,
        32,
        4,
    )
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.debug.seed = 0
    config.hf_assets_path, config.dump_folder = str(folder), str(folder / "out")
    config.dataloader.dataset_path = str(folder / "data")
    config.checkpoint.enable = config.validator.enable = False
    return config


@contextlib.contextmanager
def by_hand(recipe):
    """Each product of torchtitan's Linear under a mode, with no converted layer."""
    before = Linear.forward

    def forward(self, input):
        with fp8.autocast(recipe):
            return F.linear(input, self.weight, self.bias)

    Linear.forward = forward
    yield
    Linear.forward = before


def losses(config):
    trainer, found = config.build(), []
    step = trainer.fwd_bwd_fn

    def watched(*args, **kwargs):
        loss = step(*args, **kwargs)
        found.append(float(loss))
        return loss

    trainer.fwd_bwd_fn = watched
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()
    return found


def main(folder, model, cases):
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update(
        ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT="0", GLOO_SOCKET_IFNAME="lo"
    )
    assets(folder)
    os.chdir(folder)
    recipes = {"tensor": "tensor", "policy": POLICIES[model]}
    found = {}
    for case in cases:
        converters = [FP8Converter(recipes[case])] if case in recipes else None
        with by_hand("tensor") if case == "hand" else contextlib.nullcontext():
            found[case] = losses(config_of(model, folder, converters))
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
