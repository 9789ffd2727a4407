"""Models of sound: torchaudio, speechbrain, asteroid, demucs and conformer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .case import Case, Stranger, loss_inside, loss_outside

__all__ = ["STRANGERS"]

SECONDS = 1024
"""Samples of a sound."""


def _sources() -> Tensor:
    return torch.randn(2, 2, SECONDS)


# torchaudio


def _audio_conformer() -> Case:
    from torchaudio.models import Conformer

    sizes = {"input_dim": 64, "num_heads": 4, "ffn_dim": 128, "num_layers": 2}
    model = Conformer(**sizes, depthwise_conv_kernel_size=7)
    return Case(model, (torch.randn(4, 32, 64), torch.full((4,), 32)))


def _emformer() -> Case:
    from torchaudio.models import Emformer

    model = Emformer(64, 4, 128, 2, segment_length=4, right_context_length=1)
    return Case(model, (torch.randn(4, 33, 64), torch.full((4,), 33)))


def _audio_tasnet() -> Case:
    from torchaudio.models import ConvTasNet

    sizes = {"enc_num_feats": 64, "msk_num_feats": 32, "msk_num_hidden_feats": 64}
    model = ConvTasNet(**sizes, msk_num_layers=3, msk_num_stacks=1)
    return loss_outside(model, F.mse_loss, _sources(), torch.randn(2, 1, SECONDS))


def _wavernn() -> Case:
    from torchaudio.models import WaveRNN

    sizes = {"n_res_block": 2, "n_rnn": 64, "n_fc": 64, "n_freq": 16, "n_hidden": 16}
    model = WaveRNN([2, 2], 16, 4, **sizes, n_output=16)
    return Case(model, (torch.randn(2, 1, (16 - 4) * 4), torch.randn(2, 1, 16, 16)))


def _deepspeech() -> Case:
    from torchaudio.models import DeepSpeech

    ids, lengths = torch.randint(1, 20, (4, 8)), torch.full((4,), 8)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        steps = torch.full((4,), output.shape[1])
        return F.ctc_loss(
            output.transpose(0, 1).log_softmax(-1), target, steps, lengths
        )

    return loss_inside(DeepSpeech(16, 64, 20), loss, ids, torch.randn(4, 1, 32, 16))


def _wav2letter() -> Case:
    from torchaudio.models import Wav2Letter

    ids, lengths = torch.randint(1, 20, (2, 4)), torch.full((2,), 4)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        steps = torch.full((2,), output.shape[2])
        return F.ctc_loss(output.permute(2, 0, 1), target, steps, lengths)

    model = Wav2Letter(num_classes=20, input_type="mfcc", num_features=16)
    return loss_outside(model, loss, ids, torch.randn(2, 16, 64))


def _hdemucs() -> Case:
    from torchaudio.models import HDemucs

    model = HDemucs(["a", "b"], 1, channels=8, nfft=256, depth=3)
    return loss_outside(
        model, F.l1_loss, torch.randn(1, 2, 1, 4096), torch.randn(1, 1, 4096)
    )


def _wav2vec2() -> Case:
    from torchaudio.models import wav2vec2_model

    model = wav2vec2_model(
        extractor_mode="layer_norm",
        extractor_conv_layer_config=[(32, 8, 4), (32, 4, 4)],
        extractor_conv_bias=True,
        encoder_embed_dim=64,
        encoder_projection_dropout=0.0,
        encoder_pos_conv_kernel=16,
        encoder_pos_conv_groups=4,
        encoder_num_layers=2,
        encoder_num_heads=4,
        encoder_attention_dropout=0.0,
        encoder_ff_interm_features=128,
        encoder_ff_interm_dropout=0.0,
        encoder_dropout=0.0,
        encoder_layer_norm_first=True,
        encoder_layer_drop=0.0,
        aux_num_out=20,
    )
    return Case(model, (torch.randn(4, SECONDS),))


# speechbrain


def _ecapa() -> Case:
    from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN

    model = ECAPA_TDNN(
        16, lin_neurons=32, channels=[32] * 5, attention_channels=16, se_channels=16
    )
    return Case(model, (torch.randn(4, 32, 16),))


def _xvector() -> Case:
    from speechbrain.lobes.models.Xvector import Xvector

    model = Xvector(tdnn_channels=[32, 32, 32, 32, 64], lin_neurons=32, in_channels=16)
    return Case(model, (torch.randn(4, 32, 16),))


def _crdnn() -> Case:
    from speechbrain.lobes.models.CRDNN import CRDNN

    sizes = {
        "cnn_channels": [8, 8],
        "rnn_layers": 1,
        "rnn_neurons": 32,
        "dnn_neurons": 32,
    }
    return Case(CRDNN(input_shape=[4, 32, 16], **sizes), (torch.randn(4, 32, 16),))


def _speech_conformer() -> Case:
    from speechbrain.lobes.models.transformer.Conformer import ConformerEncoder
    from speechbrain.nnet.attention import RelPosEncXL

    model = ConformerEncoder(2, 64, 128, 4, kernel_size=7)
    sound = torch.randn(4, 32, 64)
    return Case(model, (sound,), {"pos_embs": RelPosEncXL(64)(sound)})


def _speech_lm() -> Case:
    from speechbrain.lobes.models.transformer.TransformerLM import TransformerLM

    ids = torch.randint(1, 128, (8, 32))
    model = TransformerLM(128, d_model=64, nhead=4, num_encoder_layers=2, d_ffn=128)
    return loss_inside(
        model,
        lambda y, t: F.cross_entropy(y[:, :-1].flatten(0, 1), t[:, 1:].flatten()),
        ids,
        ids,
    )


def _speech_tasnet() -> Case:
    from speechbrain.lobes.models.conv_tasnet import MaskNet

    return Case(
        MaskNet(N=32, B=16, H=32, P=3, X=2, R=1, C=2), (torch.randn(2, 32, 64),)
    )


# asteroid, with its loss over permutations of the sources


def _asteroid(name: str, settings: dict[str, Any]) -> Case:
    import asteroid.models
    from asteroid.losses import PITLossWrapper, pairwise_neg_sisdr

    loss = PITLossWrapper(pairwise_neg_sisdr, pit_from="pw_mtx")
    model = getattr(asteroid.models, name)(n_src=2, **settings)
    return loss_outside(model, loss, _sources(), torch.randn(2, 1, SECONDS))


ASTEROID: dict[str, dict[str, Any]] = {
    "ConvTasNet": {
        "n_blocks": 2,
        "n_repeats": 1,
        "bn_chan": 16,
        "hid_chan": 32,
        "skip_chan": 16,
        "n_filters": 32,
    },
    "DPRNNTasNet": {"bn_chan": 16, "hid_size": 16, "chunk_size": 20, "n_repeats": 1},
    "DPTNet": {"ff_hid": 32, "chunk_size": 20, "n_repeats": 1, "n_filters": 32},
    "SuDORMRFNet": {
        "bn_chan": 16,
        "num_blocks": 1,
        "upsampling_depth": 2,
        "n_filters": 32,
    },
}


def _conformer() -> Case:
    from conformer import Conformer

    model = Conformer(dim=64, depth=2, dim_head=16, heads=4, conv_kernel_size=7)
    return Case(model, (torch.randn(4, 32, 64),))


def _demucs() -> Case:
    from demucs.demucs import Demucs

    model = Demucs(["a", "b"], audio_channels=1, channels=8, depth=3, resample=False)
    return loss_inside(
        model, F.l1_loss, torch.randn(1, 2, 1, 4096), torch.randn(1, 1, 4096)
    )


STRANGERS = [
    Stranger("Conformer", "torchaudio", _audio_conformer),
    Stranger("Emformer", "torchaudio", _emformer),
    Stranger("ConvTasNet", "torchaudio", _audio_tasnet),
    Stranger("WaveRNN", "torchaudio", _wavernn),
    Stranger("DeepSpeech", "torchaudio", _deepspeech),
    Stranger("Wav2Letter", "torchaudio", _wav2letter),
    Stranger("HDemucs", "torchaudio", _hdemucs),
    Stranger("wav2vec2_model", "torchaudio", _wav2vec2),
    Stranger("ECAPA_TDNN", "speechbrain", _ecapa),
    Stranger("Xvector", "speechbrain", _xvector),
    Stranger("CRDNN", "speechbrain", _crdnn),
    Stranger("ConformerEncoder", "speechbrain", _speech_conformer),
    Stranger("TransformerLM", "speechbrain", _speech_lm),
    Stranger("MaskNet", "speechbrain", _speech_tasnet),
    *(
        Stranger(n, "asteroid", lambda n=n, s=s: _asteroid(n, s))
        for n, s in ASTEROID.items()
    ),
    Stranger("Conformer", "conformer", _conformer),
    Stranger("Demucs", "demucs", _demucs),
]
