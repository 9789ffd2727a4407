"""A checkpoint of a transformed model is one of its plain class, which computes the same."""

from __future__ import annotations

import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import unit_scaling as uu
from unit_scaling.transforms import simulate_fp8, unit_scale

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

IDS = torch.arange(24).reshape(2, 12)
X = torch.linspace(-2, 2, 32).view(4, 8)


def plain(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.BatchNorm1d(8))
    return nn.Sequential(body, nn.GELU(), nn.Linear(8, 4))


def scaled(seed: int = 0) -> Any:
    model = unit_scale(plain(seed))
    model(X)
    return model


def same(model: nn.Module, other: nn.Module) -> None:
    models = [copy.deepcopy(each) for each in (model, other)]
    for training in (True, False):
        results = [each.train(training)(X) for each in models]
        assert torch.equal(*results)


def saved(state: Any, folder: Path) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def distributed(state: Any, folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of one process
        dcp.save({"model": state}, checkpoint_id=folder)
        loaded = {"model": plain(2).state_dict()}
        dcp.load(loaded, checkpoint_id=folder)
    return loaded["model"]


def safe(state: Any, folder: Path) -> Any:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(state, folder / "model.safetensors")
    return safetensors.load_file(folder / "model.safetensors")


FILES: dict[str, Callable[[Any, Path], Any]] = {
    "none": lambda state, folder: copy.deepcopy(state),
    "torch.save": saved,
    "torch.distributed.checkpoint": distributed,
    "safetensors": safe,
}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_the_plain_class_loads_it(name: str, assign: bool, tmp_path: Path) -> None:
    model, other = scaled(), plain(1)
    state = model.state_dict()
    assert list(state) == list(other.state_dict())
    other.load_state_dict(FILES[name](state, tmp_path), strict=True, assign=assign)
    same(other, model)
    part = plain(2)[0]
    part.load_state_dict(model[0].state_dict(), strict=True)
    assert torch.equal(part(X), model[0](X))


def test_a_transformed_model_loads_it() -> None:
    """A transformed one, and a plain one: whatever is loaded is the model's."""
    for state in (scaled(1).state_dict(), plain(1).state_dict()):
        model, other = scaled(), plain()
        model.load_state_dict(state, strict=True)
        other.load_state_dict(state, strict=True)
        same(model, other)


def test_simulated_casts_are_not_in_it() -> None:
    model = simulate_fp8(plain())
    assert list(model.state_dict()) == list(plain().state_dict())
    other = plain(1)
    other.load_state_dict(simulate_fp8(scaled()).state_dict(), strict=False)
    same(other, scaled())


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_wrapped_for_several_devices(wrap: Any) -> None:
    model, other = wrap(scaled()), wrap(scaled(1))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert not any(set_model_state_dict(other, dict(state), options=options))
    alone = plain(1)
    alone.load_state_dict(state, strict=True)
    assert torch.equal(alone.eval()(X), model.eval()(X))
    assert torch.equal(other.eval()(X), model(X))


# The library transformers


of_transformers = pytest.mark.filterwarnings("ignore")  # theirs
logging.getLogger("transformers").setLevel(logging.ERROR)


def gpt2(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 64}
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drop, **ends))


@torch.no_grad()
def hidden(model: Any) -> Tensor:
    """The last hidden states."""
    inner = getattr(model, "transformer", model)
    return inner.eval()(input_ids=IDS).last_hidden_state


@of_transformers
@pytest.mark.parametrize("cls", ["GPT2LMHeadModel", "AutoModelForCausalLM", "AutoModel"])
def test_files_of_transformers(cls: str, tmp_path: Path) -> None:
    """Those of a part too."""
    model = unit_scale(gpt2())
    model(input_ids=IDS, labels=IDS).loss.backward()
    for i, part in enumerate((model, model.transformer)):
        part.save_pretrained(tmp_path / str(i))
        loaded = getattr(transformers, cls).from_pretrained(tmp_path / str(i))
        assert torch.equal(hidden(loaded), hidden(model))
        assert type(loaded).__module__.startswith("transformers.")


@of_transformers
def test_generation_is_that_of_the_plain_class(tmp_path: Path) -> None:
    model = unit_scale(gpt2()).eval()
    model(input_ids=IDS)
    model.save_pretrained(tmp_path)
    plain = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    given = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    for use_cache in (False, True):
        found = [
            each.generate(IDS[:1, :5], use_cache=use_cache, **given) for each in (model, plain)
        ]
        assert torch.equal(*found)


def trainer(model: nn.Module, folder: Path) -> Any:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(64, (16, 12), generator=generator)
    options = {"max_steps": 4, "save_steps": 2, "report_to": [], "use_cpu": True}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, disable_tqdm=True, **options
    )
    optimizer = uu.optim.AdamW(model.parameters(), lr=2**-6)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    return transformers.Trainer(
        model, arguments, train_dataset=rows, optimizers=(optimizer, constant)
    )


@of_transformers
def test_trainer(tmp_path: Path) -> None:
    """Its first step is the first call. It saves the model and goes on from a checkpoint."""
    pytest.importorskip("accelerate")
    model = unit_scale(gpt2())
    start = copy.deepcopy(model)
    run = trainer(model, tmp_path / "run")
    run.train()
    run.save_model(str(tmp_path / "saved"))
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert torch.equal(hidden(loaded), hidden(model))
    resumed = trainer(start, tmp_path / "run")
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    torch.testing.assert_close(hidden(start), hidden(model))
