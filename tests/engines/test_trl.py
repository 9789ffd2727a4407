"""trl, run for real: its SFTTrainer with LoRA of PEFT, on a tiny model with random weights."""

import pytest
import torch

import fp8
from tests.fp8.adapters import hub_models
from tests.shared import proves, quietly, theirs

with quietly():
    trl = pytest.importorskip("trl", reason="its own environment: make test-engines")
    peft = pytest.importorskip("peft", reason="LoRA")
    import transformers
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers

pytestmark = theirs  # of trl and what it imports

STEPS = 6


def tokenizer():
    """Of bytes."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {name: i for i, name in enumerate([*names, "<pad>", "<eos>"])}
    made = Tokenizer(models.BPE(vocab=ids, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    kind = transformers.PreTrainedTokenizerFast
    return kind(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def llama():
    torch.manual_seed(0)
    return hub_models.llama(vocab_size=258, pad_token_id=256, eos_token_id=257)


def tuned(model, folder, lora=True):
    rows = [{"text": f"after {i} comes {i + 1}"} for i in range(32)]
    arguments = trl.SFTConfig(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        max_length=32,
        use_cpu=True,
        bf16=False,
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
    )
    targets = ["q_proj", "v_proj", "down_proj"]
    adapters = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
    trainer = trl.SFTTrainer(
        model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        peft_config=adapters if lora else None,
    )
    trainer.train()
    return trainer


def losses(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def stored(model):
    return fp8.store_frozen(model.requires_grad_(False))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return losses(tuned(llama(), tmp_path_factory.mktemp("plain")))


WAYS = {"fp8": fp8.convert, "stored, fp8": lambda model: fp8.convert(stored(model))}


@proves("the field", "in trl's SFTTrainer, with PEFT", how="library")
@pytest.mark.parametrize("way", WAYS)
def test_lora(way, plain, tmp_path):
    """It trains in FP8: not the losses of the plain model, but near them.

    A cast to e4m3 has a relative error of at most 2^-4: the loss of a model near its first
    weights, whose logits are small, moves by less than that.
    """
    model = WAYS[way](llama())
    trainer = tuned(model, tmp_path)
    found = losses(trainer)
    assert found != plain
    assert found == pytest.approx(plain, rel=2**-4)
    assert found[-1] < found[0]
    done = {row.path: row.done for row in fp8.report(trainer.model)}
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    assert done[f"{layer}.base_layer"] == "converted"
    trainer.save_model(str(tmp_path / "adapters"))
    restored = peft.PeftModel.from_pretrained(llama(), str(tmp_path / "adapters"))
    name = f"{layer}.lora_B.default.weight"
    assert torch.equal(restored.state_dict()[name], trainer.model.state_dict()[name])


def test_all_weights(tmp_path):
    """Without adapters, trl trains the converted model's own weights."""
    trainer = tuned(fp8.convert(llama(), "tensor"), tmp_path, lora=False)
    found = losses(trainer)
    assert found[-1] < found[0]
    assert type(fp8.revert(trainer.model)) is transformers.LlamaForCausalLM
