from __future__ import annotations

from pathlib import Path

import heddle.kernels
from heddle.kernels import object_cache
from heddle.kernels.object_cache import is_cold, object_folder, operation_of, sources

ROOM = Path(heddle.kernels.__file__).parent


def test_an_operation_is_cold_until_object_code_of_it_lies_there(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert is_cold("rotate")
    folder = object_folder("rotate") / "rotate_0123"
    assert folder.is_relative_to(tmp_path / "heddle" / "kernels")
    folder.mkdir(parents=True)
    assert is_cold("rotate")
    (folder / "numba_cpu._rotate-1.py311.1.nbc").touch()
    assert not is_cold("rotate")
    assert is_cold("silu_mul")


def test_an_operation_is_made_of_what_it_imports():
    found = {str(path.relative_to(ROOM)) for path in sources("rotate")}
    assert {"rotate/numba_cpu.py", "compiled.py", "calls.py", "threads.py"} <= found
    assert "rms_norm/reference.py" in found  # imported by its reference
    assert not any(name.startswith(("silu_mul", "linear")) for name in found)
    assert "cache_write/triton_gpu.py" not in sources("cache_write")
    assert sources("tests.elsewhere") >= sources("rotate")


def test_a_change_of_its_sources_gives_an_operation_another_folder(monkeypatch):
    def names():
        object_cache._digest.cache_clear()
        return [object_folder(operation).name for operation in ("rotate", "silu_mul")]

    before, read = names(), Path.read_bytes
    assert names() == before
    changed = ROOM / "rms_norm" / "reference.py"
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path == changed))
    after = names()
    monkeypatch.undo()
    assert names() == before
    assert (after[0] == before[0], after[1] == before[1]) == (False, True)


def test_the_operation_of_a_module():
    assert operation_of("heddle.kernels.linear.tiles") == "linear"
    assert operation_of("tests.kernels.test_calls") == "tests.kernels.test_calls"


FORMS = ("bfloat16", "float16", "int8", "fp8_e4m3")


def test_a_form_of_an_operation_is_cold_by_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = object_folder("paged_decode") / "paged_decode_0123"
    folder.mkdir(parents=True)
    (folder / "kernel._bfloat16-1.py311.1.nbc").touch()
    (folder / "kernel._fp8-1.py311.1.nbc").touch()
    cold = [form for form in FORMS if is_cold(f"paged_decode.{form}")]
    assert cold == ["float16", "int8"]
    assert not is_cold("paged_decode")
