"""From TOML and command-line words to a checked Config: every fault at once, by name, with the remedy where one is near."""

from pathlib import Path

import pytest

from megatron_rl.config import Config, ConfigError, load_config, parse_overrides, to_toml

MINIMAL = """
[run]
name = "r"
steps = 3
[model]
path = "/models/m"
[task]
name = "chain_sum"
"""


@pytest.fixture
def toml(tmp_path):
    def write(text=MINIMAL):
        path = tmp_path / "c.toml"
        path.write_text(text)
        return path

    return write


def message(path, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_a_minimal_file_takes_the_defaults(toml):
    config = load_config(toml())
    assert config.run.steps == 3 and config.model.path == Path("/models/m") and config.rollouts.top_p == 0.95


def test_the_resolved_configuration_reads_back_equal(toml, tmp_path):
    config = load_config(
        toml(), ["--rollouts.top_p", "0.8", "--task.arguments.min_terms", "2", "--objective.off_policy_sequence_delta", "0.1"]
    )
    assert load_config(toml(to_toml(config))) == config


def test_overrides():
    words = [
        "--run.steps",
        "5",
        "--task.name=chain_sum",
        "--objective.keep-set-replay",
        "false",
        "--optimizer.learning_rate",
        "1e-3",
    ]
    words += ["--task.arguments.sizes", "[1, 2]", "--rollouts.top_k", "none", "--run.name", "a b", "--task.answer_template=a=b"]
    assert parse_overrides(words) == [
        ("run.steps", 5), ("task.name", "chain_sum"), ("objective.keep_set_replay", False), ("optimizer.learning_rate", 1e-3),
        ("task.arguments.sizes", [1, 2]), ("rollouts.top_k", None), ("run.name", "a b"), ("task.answer_template", "a=b"),
    ]  # fmt: skip


def test_an_override_wins_and_none_removes(toml):
    path = toml(MINIMAL + "[rollouts]\ntop_p = 0.5\n")
    assert load_config(path, ["--rollouts.top_p", "0.7"]).rollouts.top_p == 0.7
    assert load_config(path, ["--rollouts.top_p", "none"]).rollouts.top_p == 0.95


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["steps"], "unexpected argument 'steps'"),
        (["--steps", "3"], "unexpected argument '--steps'"),
        (["--run.steps"], "no value"),
        (["--run.steps.more", "3"], "steps is a value, not a section"),
    ],
)
def test_words_that_are_no_overrides(toml, words, says):
    assert says in message(toml(), words)


def test_unknown_keys_fail_with_the_nearest_known(toml):
    assert "rollouts.top_pp: unknown key; did you mean top_p?" in message(toml(), ["--rollouts.top_pp", "0.5"])
    assert "unknown key" in message(toml(), ["--rolouts.top_p", "0.5"])
    assert "did you mean rollouts" in message(toml(), ["--rolouts.top_p", "0.5"])
    assert "this section has: path, published_config, architecture, dtype" in message(toml(), ["--model.zzz", "1"])


def test_all_faults_are_said_at_once_with_their_values(toml):
    text = message(toml(), ["--run.steps", "0", "--rollouts.top_p", "1.5", "--optimizer.decay", "sine"])
    for part in ("run.steps = 0", "rollouts.top_p = 1.5", "optimizer.decay = 'sine'"):
        assert part in text
    assert len(text.splitlines()) == 4


def test_a_value_of_the_wrong_type_is_refused_not_converted(toml):
    assert "run.steps" in message(toml(), ["--run.steps", "many"])
    assert "run.steps" in message(toml(), ["--run.steps", "2.5"])


def test_missing_sections_and_files(toml, tmp_path):
    text = message(toml("[run]\nname = 'r'\n"))
    for part in ("run.steps: is missing", "model: is missing", "task: is missing"):
        assert part in text
    assert "cannot be read" in message(tmp_path / "absent.toml")
    assert "not valid TOML" in message(toml("[run\n"))
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert "bytes.toml" in message(tmp_path / "bytes.toml")


def test_docstrings_describe_the_fields():
    """The JSON schema, and so --help, reads them."""
    fields = Config.model_json_schema()["$defs"]["Rollouts"]["properties"]
    assert "policy versions" in fields["max_staleness"]["description"]
