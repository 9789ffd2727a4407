"""axolotl, run for real: its plugin manager and its Trainer, on a tiny model."""

import pytest
import torch

import fp8
from tests.fp8.adapters import hub_models
from tests.shared import proves, quietly, theirs

with quietly():
    pytest.importorskip("axolotl", reason="its own environment: make test-engines")
    import peft
    import transformers
    from axolotl.core.trainers.base import AxolotlTrainer
    from axolotl.core.training_args import AxolotlTrainingArguments
    from axolotl.integrations.base import PluginManager
    from axolotl.utils.dict import DictDefault
    from datasets import Dataset

pytestmark = theirs  # of axolotl and what it imports

IDS = torch.randint(64, (32, 16), generator=torch.Generator().manual_seed(0)).tolist()
ROWS = Dataset.from_list([{"input_ids": row, "labels": row} for row in IDS])
LORA = peft.LoraConfig(target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")


def llama():
    torch.manual_seed(0)
    return hub_models.llama()


def loaded():
    """As `axolotl.loaders.ModelLoader` gives a model to the plugins of a configuration."""
    manager = PluginManager.get_instance()
    manager.register("tests.engines.fp8_plugin.FP8Plugin")
    model = llama()
    manager.pre_lora_load(DictDefault({}), model)
    return model


def losses(folder, model, kind, arguments):
    settings = arguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
    )
    trainer = kind(model, settings, train_dataset=ROWS)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@proves("the field", "in axolotl's Trainer", how="library")
@pytest.mark.parametrize("lora", [False, True])
def test_plugin(lora, tmp_path):
    """To the bit as transformers' Trainer with a model that the caller has converted."""

    def adapted(model):
        torch.manual_seed(1)
        return peft.get_peft_model(model, LORA) if lora else model

    theirs = (AxolotlTrainer, AxolotlTrainingArguments)
    trained = losses(tmp_path / "plugin", adapted(loaded()), *theirs)
    by_hand = adapted(fp8.convert(llama(), "tensor"))
    usual = (transformers.Trainer, transformers.TrainingArguments)
    assert trained == losses(tmp_path / "hand", by_hand, *usual)
    assert trained != losses(tmp_path / "plain", adapted(llama()), *theirs)
