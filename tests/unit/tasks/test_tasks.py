"""Prompts as pure functions of (seed, index), rewards, and errors that say what to do."""

import json
import math

import numpy as np
import pytest

from megatron_rl.config.sections import Task as TaskSection
from megatron_rl.tasks import RewardError, TaskError, load_task
from megatron_rl.tasks.task import extract_answer

SUMS = {"name": "chain_sum", "arguments": {"min_terms": 2, "max_terms": 2, "max_digits": 2}, "prompt_template": "{expression} ="}


def write_lines(tmp_path, *lines):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def write_module(tmp_path, monkeypatch, name, text):
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    return name


def test_reasoning_gym_items_are_a_function_of_seed_and_index():
    first, again, other = (load_task(TaskSection(**SUMS), seed) for seed in (5, 5, 6))
    order = [9, 0, 70_000, 3]
    assert [first.prompt(i) for i in order] == [again.prompt(i) for i in reversed(order)][::-1]
    assert {first.prompt(i) for i in range(20)} != {other.prompt(i) for i in range(20)}
    # reasoning-gym seeds an item with seed + index: seed 6 must not be seed 5 shifted by one
    assert [first.prompt(i + 1) for i in range(5)] != [other.prompt(i) for i in range(5)]


def test_reasoning_gym_repeats_after_size():
    task = load_task(TaskSection(**SUMS, size=7), 1)
    assert task.prompt(3) == task.prompt(10) and task.score(10, task.solution(3)) == 1.0


def test_reasoning_gym_scores_the_extracted_answer():
    task = load_task(TaskSection(**SUMS), 1)
    right = task.solution(4)
    assert str(eval(task.prompt(4).removesuffix("="))) == right
    assert task.score(4, f" {right}\n") == 1.0 and task.score(4, f"think <answer>{right}</answer>.") == 1.0
    assert task.score(4, "no") < 1.0 and task.score(4, "") < 1.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [(" 12 \n", "12"), ("a <answer>1</answer> b <answer> 2\n</answer> c", "2"), ("<answer>open", "<answer>open"), ("", "")],
)
def test_extract_answer(completion, answer):
    assert extract_answer(completion) == answer


def test_an_answer_that_is_never_closed_takes_no_longer_for_its_length():
    """An expression took 54 s for 16000 of them; a million would take it days."""
    unclosed = "<answer>" * 1_000_000
    assert extract_answer(unclosed) == unclosed
    assert extract_answer(f"{unclosed}7</answer>") == f"{unclosed[len('<answer>') :]}7"
    assert extract_answer("<answer>1</answer>" * 100_000 + "<answer>") == "1"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "chian_sum"}, "similar names are chain_sum"),
        ({"name": "chain_sum", "arguments": {"terms": 3}}, "it takes min_terms, max_terms"),
        ({"name": "chain_sum", "arguments": {"min_terms": 5, "max_terms": 2}}, "max_terms must be >= min_terms"),
        ({"name": "chain_sum", "prompt_template": "{promt}"}, "the names of this task are answer, difficulty, expression"),
        ({"name": "chain_sum", "prompt_template": "\\boxed{}"}, "write literal braces twice"),
        ({"name": "chain_sum", "reward": "no_such_module_here:f"}, "importing no_such_module_here failed"),
        ({"name": "chain_sum", "reward": "math"}, "write it as module:function"),
        ({"name": "chain_sum", "reward": "math:sqroot"}, "math has no function sqroot; it has sqrt"),
        ({"file": "nowhere.jsonl"}, "nowhere.jsonl: cannot be read"),
    ],
)
def test_bad_sections_are_refused_with_a_remedy(section, message):
    with pytest.raises(TaskError, match=".*" + message.replace("\\", "\\\\")):
        load_task(TaskSection(**section), 0)


def test_jsonl_goes_round_in_another_order_each_time(tmp_path):
    path = write_lines(tmp_path, *({"prompt": f"p{n}", "answer": f"a{n}"} for n in range(30)), "")
    task, again = load_task(TaskSection(file=path), 3), load_task(TaskSection(file=path), 3)
    rounds = [[task.prompt(i) for i in range(r * 30, r * 30 + 30)] for r in range(3)]
    assert all(sorted(r) == sorted(rounds[0]) for r in rounds) and rounds[0] != rounds[1] != rounds[2]
    assert [again.prompt(i) for i in (77, 2, 31)] == [task.prompt(i) for i in (77, 2, 31)]
    assert [load_task(TaskSection(file=path), 4).prompt(i) for i in range(30)] != rounds[0]


def test_jsonl_rewards_exact_matches_and_brings_solutions(tmp_path):
    path = write_lines(tmp_path, {"prompt": "2+2", "answer": "4 ", "solution": "it is 4", "level": "easy"})
    task = load_task(TaskSection(file=path, prompt_template="[{level}] {prompt} = {{}}"), 0)
    assert task.prompt(0) == "[easy] 2+2 = {}" and task.solution(0) == "it is 4"
    assert [task.score(0, c) for c in ("4", " 4\n", "<answer>4</answer>", "44", "it is 4")] == [1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{bad", "line 2: not valid JSON"),
        ("[" * 100_000, "line 2: not valid JSON"),
        ("[1]", "line 2: found '\\[1\\]'; each line is one JSON object"),
        ({"answer": "4"}, "line 2: 'prompt' is None; it must be a string"),
        ({"prompt": "x", "answer": 4}, "line 2: 'answer' is 4; it must be a string .not needed with your own reward"),
        ('{"prompt": "c\\ud83d", "answer": "4"}', "line 2: 'prompt' has an unpaired surrogate"),
        ({"prompt": "x", "answer": "4", "solution": []}, "line 2: 'solution' is \\[\\]"),
    ],
)
def test_jsonl_faults_name_file_and_line(tmp_path, line, message):
    path = write_lines(tmp_path, {"prompt": "p", "answer": "a"}, line)
    with pytest.raises(TaskError, match=f"data.jsonl, {message}"):
        load_task(TaskSection(file=path), 0)


def test_empty_file_is_refused(tmp_path):
    with pytest.raises(TaskError, match="has no lines"):
        load_task(TaskSection(file=write_lines(tmp_path, "", "  ")), 0)


def test_own_reward_from_the_current_folder(tmp_path, monkeypatch):
    text = "def length(prompt, completion, item):\n    return len(completion) + item['bonus'] + (prompt == '>p')\n"
    name = write_module(tmp_path, monkeypatch, "rewards_of_mine", text)
    path = write_lines(tmp_path, {"prompt": "p", "bonus": 10})
    task = load_task(TaskSection(file=path, prompt_template=">{prompt}", reward=f"{name}:length"), 0)
    assert task.score(0, "abc") == 14.0


def test_items_without_an_answer_have_no_solution(tmp_path):
    task = load_task(TaskSection(file=write_lines(tmp_path, {"prompt": "p"}), reward="math:fsum"), 0)
    with pytest.raises(TaskError, match="prompt 0 has no answer to learn from"):
        task.solution(0)


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1", [1.0]])
def test_rewards_that_are_no_finite_numbers(monkeypatch, tmp_path, value):
    task = load_task(TaskSection(file=write_lines(tmp_path, {"prompt": "p", "answer": "a"})), 0)
    object.__setattr__(task, "reward", lambda *_: value)
    with pytest.raises(RewardError, match="a reward must be a finite number"):
        task.score(0, "x")


@pytest.mark.parametrize("value", [np.float32(0.5), np.int64(1), True, 0.25])
def test_numbers_of_all_kinds_are_rewards(tmp_path, value):
    task = load_task(TaskSection(file=write_lines(tmp_path, {"prompt": "p", "answer": "a"})), 0)
    object.__setattr__(task, "reward", lambda *_: value)
    assert task.score(0, "x") == float(value) and type(task.score(0, "x")) is float


def test_a_reward_that_raises_shows_its_last_lines(tmp_path, monkeypatch):
    text = "def fails(prompt, completion, item):\n    limit = 3\n    return {}['gone']  # here\n"
    name = write_module(tmp_path, monkeypatch, "rewards_that_fail", text)
    task = load_task(TaskSection(**SUMS, reward=f"{name}:fails"), 0)
    with pytest.raises(RewardError, match=r"(?s)the reward of prompt 8 raised: .*# here.*KeyError: 'gone'"):
        task.score(8, "x")


def test_environment_answers_turns(tmp_path, monkeypatch):
    text = "def reply(turns, item):\n    return None if len(turns) > 3 else f\"{item['prompt']}: {turns[-1]['content']}\"\n"
    name = write_module(tmp_path, monkeypatch, "environments_of_mine", text)
    path = write_lines(tmp_path, {"prompt": "p", "answer": "a"})
    task = load_task(TaskSection(file=path, environment=f"{name}:reply"), 0)
    turns = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "look"}]
    assert task.reply(0, turns) == "p: look" and task.reply(0, turns * 2) is None
    object.__setattr__(task, "environment", lambda turns, item: 7)
    with pytest.raises(RewardError, match="returned 7; it must return a string"):
        task.reply(0, turns)
