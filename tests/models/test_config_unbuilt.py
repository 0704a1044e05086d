"""An architecture that is known and not built is refused with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from heddle.errors import UnsupportedError
from heddle.models.config_json import ARCHITECTURES, load_model_config
from heddle.models.config_unbuilt import UNBUILT
from tests.support.model_files import DEEPSEEK_V3, write_config


@pytest.mark.parametrize("name", UNBUILT)
def test_it_is_refused_by_name_and_reason(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        load_model_config(write_config(tmp_path, DEEPSEEK_V3, architectures=[name]))
    assert f"architectures=['{name}'] is not supported" in str(caught.value)
    assert f"because {UNBUILT[name]}; known: " in str(caught.value)


def test_what_is_built_is_not_listed() -> None:
    assert UNBUILT
    assert not set(UNBUILT) & set(ARCHITECTURES)
