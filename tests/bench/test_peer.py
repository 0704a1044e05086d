from __future__ import annotations

import sys

import pytest

from heddle.bench.contest import Answered
from heddle.bench.peer import Peer, peer_command, present_peers
from heddle.errors import ConfigError, HeddleError

ECHO = """
import sys
from heddle.bench.lines import Clock, serve

class Echo:
    version, dtype = "1", "{dtype}"
    def run(self, prompts, num_tokens):
        if prompts[0] == [13]:
            raise ValueError("unlucky")
        if prompts[0] == [66]:
            sys.exit("last words")
        clock = Clock(); clock.first()
        return clock.answer([prompt[:num_tokens] for prompt in prompts])

serve("echo", lambda arguments: Echo())
"""


@pytest.fixture
def echo(tmp_path):
    script = tmp_path / "peer.py"
    script.write_text(ECHO.format(dtype="float32"))
    peer = Peer([sys.executable, str(script)], tmp_path, num_threads=1, max_model_len=8)
    with peer:
        yield peer


def test_a_peer_answers_question_after_question(echo):
    assert echo.name == "echo"
    assert echo.is_exact
    first = echo.run([[4, 5, 6], [7, 8, 9]], 2)
    assert isinstance(first, Answered)
    assert first.tokens == ((4, 5), (7, 8))
    assert echo.run([(1, 2)], 1).tokens == ((1,),)


def test_an_error_of_a_peer_names_it_and_leaves_it_running(echo):
    with pytest.raises(HeddleError, match="peer echo: ValueError: unlucky"):
        echo.run([[13]], 1)
    assert echo.run([[4]], 1).tokens == ((4,),)


def test_a_peer_that_ends_is_told_with_its_last_words(echo):
    with pytest.raises(HeddleError, match=r"a peer ended .*last words"):
        echo.run([[66]], 1)


def test_a_peer_that_never_gets_ready_is_told(tmp_path):
    with pytest.raises(HeddleError, match=r"a peer ended .*no such luck"):
        Peer(
            [sys.executable, "-c", "raise SystemExit('no such luck')"],
            tmp_path,
            num_threads=1,
            max_model_len=8,
        )


def test_narrow_peers_are_not_exact(tmp_path):
    script = tmp_path / "peer.py"
    script.write_text(ECHO.format(dtype="as stored"))
    command = [sys.executable, str(script)]
    with Peer(command, tmp_path, num_threads=1, max_model_len=8) as peer:
        assert not peer.is_exact


def test_peers_are_folders_with_a_python_and_a_script(tmp_path):
    whole, part = tmp_path / "whole", tmp_path / "part"
    for folder in (whole, part):
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").touch()
    (whole / "peer.py").touch()
    assert present_peers(tmp_path) == ["transformers", "whole"]
    assert present_peers(tmp_path / "nothing") == ["transformers"]
    assert peer_command("whole", tmp_path) == [
        str(whole / "bin" / "python"),
        str(whole / "peer.py"),
    ]
    assert peer_command("transformers", tmp_path)[1:] == ["-m", "heddle.bench.transformers_peer"]
    with pytest.raises(ConfigError, match=r"peer 'part' is not set up: .*here are: transformers, "):
        peer_command("part", tmp_path)
