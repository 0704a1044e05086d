"""Image, audio and encoder-decoder models are refused, and told apart from unknown ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heddle.errors import UnsupportedError
from heddle.models.config_json import load_model_config
from tests.support.tiny import tiny_config


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        ("Qwen2_5_VLForConditionalGeneration", {"vision_config": {"depth": 2}}, "reads images"),
        ("LlavaForConditionalGeneration", {"image_token_index": 7}, "reads images"),
        ("VoxtralForConditionalGeneration", {"audio_config": {"x": 1}}, "no audio encoder here"),
        ("T5ForConditionalGeneration", {"is_encoder_decoder": True}, "is an encoder-decoder"),
        ("WhisperForConditionalGeneration", {"is_encoder_decoder": True}, "only decoders run"),
    ],
)
@pytest.mark.parametrize("impl", ["auto", "native", "transformers"])
def test_a_model_that_is_no_text_decoder_is_refused_by_name(
    tmp_path: Path, architecture: str, settings: dict[str, object], message: str, impl: str
) -> None:
    config = {"architectures": [architecture], "model_type": "llama", **settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=message) as refusal:
        load_model_config(tmp_path, "", impl)  # type: ignore[arg-type]
    assert architecture in str(refusal.value)
    assert str(tmp_path / "config.json") in str(refusal.value)


def test_a_text_decoder_is_not_judged_by_idle_keys(tmp_path: Path) -> None:
    """Text-only checkpoints that were cut out of larger models keep some of their keys."""
    config = tiny_config("llama-6-2").to_dict() | {"image_token_id": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model_config(tmp_path).architecture == "LlamaForCausalLM"
