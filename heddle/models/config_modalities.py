"""Models that read more than text, or are no decoders, told by their configuration and refused."""

from __future__ import annotations

from heddle.errors import UnsupportedError
from heddle.models.config_fields import Fields

_PARTS = {
    "vision_config": "images",
    "vision_tower": "images",
    "mm_vision_tower": "images",
    "visual": "images",
    "image_token_id": "images",
    "image_token_index": "images",
    "video_token_id": "video",
    "audio_config": "audio",
    "audio_encoder_config": "audio",
    "speech_config": "audio",
    "num_mel_bins": "audio",
}
"""Key of a configuration -> what the model reads beside text."""


def refuse_other_modalities(fields: Fields) -> None:
    """Refuse what a text decoder is not.

    Args:
        fields: top level of a `config.json` whose architecture is not built here.
    Raises:
        UnsupportedError: names the architecture, the key that tells, and what is missing.
    """
    names = list(fields.strings("architectures")) if "architectures" in fields else []
    start = f"{fields.path}: architectures={names} is not supported"
    if fields.boolean("is_encoder_decoder", False):
        raise UnsupportedError(
            f"{start}: it is an encoder-decoder (is_encoder_decoder), and there is no encoder and "
            "no cross attention here; only decoders run"
        )
    for key, what in _PARTS.items():
        if key in fields:
            raise UnsupportedError(
                f"{start}: it reads {what} ({key}), and there is no {what} encoder here; text and "
                "`prompt_embeds` are what a prompt may hold"
            )
