from __future__ import annotations

import json

from heddle.cli.main import main


def test_a_model_of_the_catalogue_is_shown_by_name(capsys) -> None:
    assert main(["show", "DeepSeek-V3", "-tp", "8", "-dcp", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["num_layers"] == 61
    assert found["model"]["kv_heads"] == 1
    assert found["step"]["cache_groups"][0]["calls"] > 0


def test_an_unknown_name_is_still_refused(capsys) -> None:
    assert main(["show", "deepseek-v99"]) == 2
    assert "is not found" in capsys.readouterr().err
