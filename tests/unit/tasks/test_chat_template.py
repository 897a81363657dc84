"""Chat templates against transformers' own apply_chat_template on the same folder, with random conversations.

The templates (templates.py) are written for these tests, with the constructs of published ones; published files are not
tried here. The day does not change between the two renderings, but at midnight.
"""

import json
import random
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_rl.config.sections import Task as TaskSection
from megatron_rl.tasks import TaskError, TextEncoder
from megatron_rl.tasks.chat_template import ChatTemplate
from tests.unit.tasks.templates import TEMPLATES

transformers = pytest.importorskip("transformers")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Says <b>\"é\"</b> & 'more'.",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "enum": ["a", "b"]},
                    "days": {"type": ["integer", "null"], "description": "how many"},
                    "tags": {"type": "array", "items": {"type": "number"}},
                },
                "required": ["place"],
            },
        },
    }
    for name in ("weather", "größe")
]
TOKENS = ("<s>", "</s>", "<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
END_OF_TURN = {
    "qwen3": "<|im_end|>", "qwen3-coder": "<|im_end|>", "deepseek-v3": "</s>", "kimi-k2": "<|im_end|>", "mixtral": "</s>",
    "llama-3.1": "<|eot_id|>", "gpt-oss": "<|return|>", "smollm3": "<|im_end|>", "gemma-like": "<end_of_turn>",
    "glm-4.5": "<|user|>", "deepseek-r1": "<｜end▁of▁sentence｜>", "asks-whether-none": "<|im_end|>",
}  # fmt: skip


def make_folder(folder, template=None, **settings):
    """A byte-level tokenizer with the special tokens of all the templates."""
    special = list(dict.fromkeys([*TOKENS, *END_OF_TURN.values()]))
    names = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    written = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **settings}
    if template is not None:
        written["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(written))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    return folder


def conversation(rng):
    """A random one: perhaps a system message, turns with thoughts, tool calls and tools' answers; perhaps roles out of order."""
    words = ["é", "2 < 3", '"q"', "\n", "  ", "<think>a\n</think>\n\nb", "/nothink", "x" * 30, "{}", "\\", "日本"]

    def text():
        return "".join(rng.choice(words) for _ in range(rng.randint(0, 4)))

    messages = [{"role": "system", "content": text()}] if rng.random() < 0.4 else []
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": text()})
        if rng.random() < 0.4:
            arguments = {"place": text(), "days": rng.choice([None, 3, 2.5]), "more": {"é": [1, "<"]}}
            call = {
                "id": "call_0",
                "type": "function",
                "function": {"name": rng.choice(["weather", "größe"]), "arguments": arguments},
            }
            messages.append({"role": "assistant", "content": rng.choice(["", text()]), "tool_calls": [call]})
            messages.append({"role": "tool", "content": text(), "tool_call_id": "call_0"})
        if rng.random() < 0.8:
            messages.append({"role": "assistant", "content": text()})
    return messages


def outcome(render):
    try:
        return render()
    except TaskError as error:
        return type(error.__cause__).__name__
    except Exception as error:
        return type(error).__name__


@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_are_rendered_as_by_transformers(name, tmp_path):
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(make_folder(tmp_path, TEMPLATES[name]))
    rng, seen = random.Random(name), set()
    for _ in range(60):
        messages, opens = conversation(rng), rng.random() < 0.5
        arguments = {}
        if rng.random() < 0.5:
            arguments["enable_thinking"] = rng.random() < 0.5
        if rng.random() < 0.4:
            arguments["tools"] = TOOLS[: rng.randint(1, 2)]
        if rng.random() < 0.3:
            arguments["documents"] = [{"title": "b", "text": "é<"}, {"title": "a", "text": ""}]
        own = ChatTemplate(tmp_path, arguments=arguments)
        mine = outcome(lambda own=own, m=messages, opens=opens: own.render(m, add_generation_prompt=opens))
        expected = outcome(
            lambda m=messages, opens=opens, a=arguments: theirs.apply_chat_template(
                m, add_generation_prompt=opens, tokenize=False, **a
            )
        )
        assert mine == expected
        seen.add(expected)
    assert len(seen) > 30  # conversations of many kinds, few of them refused


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_have_the_ids_that_transformers_gives_and_solutions_end_as_the_template_closes_a_turn(name, tmp_path):
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(make_folder(tmp_path, TEMPLATES[name]))
    arguments = {"enable_thinking": False, "tools": TOOLS}
    section = TaskSection(name="chain_sum", chat_template=True, system_prompt="Be brief. é", template_arguments=arguments)
    text = TextEncoder(tmp_path, section)
    messages = [{"role": "system", "content": "Be brief. é"}, {"role": "user", "content": " 2 + 2?\n"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False, **arguments)
    assert list(text.prompt(" 2 + 2?\n")) == expected
    assert text.solution("4")[-1] == theirs.convert_tokens_to_ids(END_OF_TURN[name])


def test_the_template_among_several_is_the_one_that_transformers_takes(tmp_path):
    several = [
        {"name": "default", "template": "d{{ messages[0].content }}"},
        {"name": "tool_use", "template": "t{{ tools | length }}"},
    ]
    make_folder(tmp_path, several)
    messages = [{"role": "user", "content": "x"}]

    def both(**arguments):
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
        expected = theirs.apply_chat_template(messages, tokenize=False, **arguments)
        assert ChatTemplate(tmp_path, arguments=arguments).render(messages) == expected
        return expected

    assert [both(), both(tools=TOOLS), both(chat_template="tool_use", tools=TOOLS[:1])] == ["dx", "t2", "t1"]
    with pytest.raises(TaskError, match="template_arguments.chat_template = 'rag': .* has default, tool_use; name one"):
        ChatTemplate(tmp_path, arguments={"chat_template": "rag"})
    # Files come before tokenizer_config.json, all of it.
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("r{{ documents | length }}")
    with pytest.raises(TaskError, match="chat templates rag and no default"):
        ChatTemplate(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("f{{ messages[0].content }}")
    assert [both(), both(tools=TOOLS), both(chat_template="rag", documents=[])] == ["fx", "fx", "r0"]


def test_special_tokens_of_an_older_folder(tmp_path):
    make_folder(tmp_path, "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}", bos_token=None, eos_token=None)
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": "<pad>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    assert ChatTemplate(tmp_path).render([]) == "<s>|</s>|<pad>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('users only') }}", "users only"),
        ("{{ messages[0].content.nothing.more }}", "UndefinedError"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages | tojson(indent=messages) }}", "TypeError"),
    ],
)
def test_a_template_that_fails_is_a_fault_of_the_task_that_says_what_to_set(template, message, tmp_path):
    text = TextEncoder(make_folder(tmp_path, template), TaskSection(name="chain_sum", chat_template=True))
    with pytest.raises(TaskError, match=f"cannot be rendered .*{message}.*task.system_prompt or task.template_arguments"):
        text.prompt("x")


@pytest.mark.parametrize("wrong", [[{"nome": "default", "template": "x"}], [{"name": "default"}], ["x"], {"default": 1}, 5])
def test_what_is_no_template_in_the_settings_is_named(wrong, tmp_path):
    with pytest.raises(TaskError, match=r"tokenizer_config.json: chat_template is .* must be a template, or a list"):
        ChatTemplate(make_folder(tmp_path, wrong))


def test_arguments_that_the_program_gives_are_refused(tmp_path):
    with pytest.raises(TaskError, match="template_arguments has bos_token, messages, tokenize, which the program"):
        ChatTemplate(
            make_folder(tmp_path, "x"), arguments={"messages": [], "bos_token": "<s>", "tokenize": True, "enable_thinking": True}
        )


def test_the_renderer_comes_without_torch():
    probe = "import sys; import transformers.utils.chat_template_utils; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout.strip() == "False"
