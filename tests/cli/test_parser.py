from __future__ import annotations

import pytest

from heddle.cli.flags import add_engine_flags, add_layout_flags, command_parser
from heddle.cli.output import Output
from heddle.cli.parser import CommandParser, is_flag, normalise
from heddle.cli.values import size_or_auto
from heddle.errors import ConfigError


def make(environment: dict[str, str] | None = None) -> tuple[CommandParser, list[str]]:
    warnings: list[str] = []
    parser = CommandParser("try", "for tests", environment or {}, warnings.append)
    parser.add_argument("model")
    parser.add_argument("prompt", nargs="?")
    parser.declare("output", "--json", action="store_true")
    parser.declare("try", "--chat", action="store_true")
    parser.declare("try", "--lengths", type=int, nargs="+", default=[])
    parser.declare("try", "--limit", type=size_or_auto)
    add_layout_flags(parser)
    add_engine_flags(parser)
    return parser, warnings


def parse(*words: str, environment: dict[str, str] | None = None):
    return make(environment)[0].parse(words)


@pytest.mark.parametrize(
    "words",
    [
        ("-tp", "2"),
        ("-tp=2",),
        ("--tensor-parallel-size", "2"),
        ("--tensor_parallel_size=2",),
        ("--tensor_parallel-size", "2"),
    ],
)
def test_every_spelling_of_a_flag_sets_it(words):
    assert parse("demo", *words).tensor_parallel_size == 2


@pytest.mark.parametrize("words", [("-t", "2"), ("-d", "2"), ("-tp2",), ("--tensor-parallel", "2")])
def test_undeclared_short_forms_and_abbreviations_are_refused(words):
    with pytest.raises(ConfigError, match=f"{words[0]} is not a flag of heddle try"):
        parse("demo", *words)


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("--blok-size", "--block-size"),
        ("--max_model_length", "--max-model-len"),
        ("--dtyp", "--dtype"),
    ],
)
def test_an_unknown_flag_names_the_nearest_and_the_nearest_is_accepted(unknown, nearest):
    with pytest.raises(ConfigError, match=f"the nearest flag is {nearest}$"):
        parse("demo", unknown, "16")
    assert nearest in make()[0].flags


@pytest.mark.parametrize("word", ["-v", "--n", "--best-of"])
def test_a_flag_that_is_near_to_none_is_sent_to_the_help(word):
    with pytest.raises(ConfigError, match=f"^{word} is not a flag of heddle try; see heddle try"):
        parse("demo", word, "2")


@pytest.mark.parametrize(
    "words",
    [
        ("demo", "--chat", "hello there"),
        ("--chat", "demo", "hello there"),
        ("demo", "hello there", "--chat"),
        ("-pcp", "2", "demo", "--chat", "-dcp", "2", "hello there", "--json"),
    ],
)
def test_options_may_stand_between_positionals(words):
    arguments = parse(*words)
    assert (arguments.model, arguments.prompt, arguments.chat) == ("demo", "hello there", True)


def test_a_prompt_may_look_odd():
    assert parse("demo", "- a list item").prompt == "- a list item"
    assert parse("demo", "--chat", "--", "--chat is a flag").prompt == "--chat is a flag"
    assert parse("demo", "-5").prompt == "-5"


def test_a_list_flag_takes_words_up_to_the_next_flag():
    assert parse("demo", "--lengths", "1", "2", "3", "--chat").lengths == [1, 2, 3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("demo", "-tp"), "expected one argument"),
        (("demo", "-tp", "two"), "'two' is not a whole number such as 2"),
        (("demo", "--dcp-comm-backend", "nccl"), "invalid choice: 'nccl'"),
        (("demo", "one", "two"), "unrecognized arguments: two"),
        ((), "required: model"),
    ],
)
def test_what_argparse_refuses_becomes_one_error(words, message):
    with pytest.raises(ConfigError, match=message):
        parse(*words)


def test_an_old_name_of_the_interleave_is_accepted():
    assert parse("demo", "--dcp-kv-cache-interleave-size", "4").cp_kv_cache_interleave_size == 4


def test_flags_of_other_engines_are_ignored_aloud_or_refused_with_a_pointer():
    parser, warnings = make()
    arguments = parser.parse(
        [
            "--swap-space",
            "4",
            "demo",
            "--disable-custom-all-reduce",
            "say",
            "--disable_log_requests",
        ]
    )
    assert (arguments.model, arguments.prompt) == ("demo", "say")
    assert [line.split()[0] for line in warnings] == [
        "--swap-space",
        "--disable-custom-all-reduce",
        "--disable-log-requests",
    ]
    with pytest.raises(ConfigError, match=r"--data-parallel-backend .*: run one engine per"):
        parse("demo", "--data-parallel-backend", "mp")


@pytest.mark.parametrize("name", ["--executor", "--distributed-executor-backend"])
@pytest.mark.parametrize(("word", "executor"), [("mp", "processes"), ("ray", "ray")])
def test_executors_have_the_names_that_are_known_elsewhere(name, word, executor):
    assert parse("demo", name, word).executor == executor
    with pytest.raises(ConfigError, match="moon"):
        parse("demo", name, "moon")


def test_the_environment_is_below_a_flag_and_above_the_default():
    environment = {
        "HEDDLE_TENSOR_PARALLEL_SIZE": "3",
        "HEDDLE_CHAT": "yes",
        "HEDDLE_LIMIT": "32k",
        "HEDDLE_ENABLE_PREFIX_CACHING": "off",
        "HEDDLE_DCP_COMM_BACKEND": "a2a",
    }
    arguments = parse("demo", environment=environment)
    assert arguments.tensor_parallel_size == 3
    assert arguments.chat is True
    assert arguments.limit == 32000
    assert arguments.enable_prefix_caching is False
    assert arguments.dcp_comm_backend == "a2a"
    assert parse("demo", "-tp", "5", environment=environment).tensor_parallel_size == 5
    assert parse("demo").tensor_parallel_size == 1


def test_a_list_flag_reads_words_from_its_variable():
    environment = {"HEDDLE_LENGTHS": "16 32"}
    assert parse("demo", environment=environment).lengths == [16, 32]
    assert parse("demo", "--lengths", "5", environment=environment).lengths == [5]


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("HEDDLE_TENSOR_PARALLEL_SIZE", "two"),
        ("HEDDLE_CHAT", "perhaps"),
        ("HEDDLE_DCP_COMM_BACKEND", "nccl"),
        ("HEDDLE_LIMIT", "1.5K"),
        ("HEDDLE_LENGTHS", "16 many"),
        ("HEDDLE_LENGTHS", ""),
    ],
)
def test_a_bad_variable_is_named(variable, text):
    with pytest.raises(ConfigError, match=f"^{variable}='{text}'"):
        parse("demo", environment={variable: text})


def test_help_shows_all_a_group_or_one_flag():
    parser, _ = make()
    whole = parser.help_topic(["demo", "--help"])
    assert whole is not None
    assert whole == parser.help_topic(["-h"]) == parser.help_topic(["--help=all"])
    assert "--tensor-parallel-size" in whole
    assert "--max-num-seqs" in whole
    group = parser.help_topic(["--help=layout"])
    assert group is not None
    assert "--block-size" in group
    assert "--max-num-seqs" not in group
    flag = parser.help_topic(["--help=--block_size"])
    assert flag is not None
    assert "Tokens of one physical page on one rank." in flag
    assert "--dtype" not in flag
    assert parser.help_topic(["demo", "--", "--help"]) is None
    with pytest.raises(ConfigError, match="groups: output, try, layout, engine"):
        parser.help_topic(["--help=nothing"])


def test_flag_words_are_told_from_values():
    assert [is_flag(word) for word in ("-tp", "--x", "--x=a b", "-x=1")] == [True] * 4
    assert [is_flag(word) for word in ("-", "-3", "-0.5", "- item", "x", "")] == [False] * 6
    assert normalise("--max_tokens_x") == "--max-tokens-x"
    assert normalise("-t_p") == "-t-p"


def test_common_flags_are_on_every_command():
    parser = command_parser("try", "for tests", {}, Output())
    assert {"--help", "--json", "--debug"} <= set(parser.flags)
