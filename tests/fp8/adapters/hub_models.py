"""Small models of the library transformers; a test file that imports them is skipped without it."""

import logging

import pytest

from tests.shared import quietly

with quietly():
    transformers = pytest.importorskip("transformers", reason="the models")


@pytest.fixture(autouse=True)
def quiet():
    """Of each file that imports it."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()


def llama(**options):
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | options)))


def gpt2(**options):
    """Its head tied to its embedding, its layers Conv1D."""
    sizes = {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 64,
        "vocab_size": 64,
    }
    zeros = "resid_pdrop embd_pdrop attn_pdrop bos_token_id eos_token_id".split()
    config = transformers.GPT2Config(**(sizes | dict.fromkeys(zeros, 0) | options))
    return transformers.GPT2LMHeadModel(config)
