"""The encoder against transformers' own tokenizer and chat template, on model folders written here."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from megatron_rl.config.sections import Task as TaskSection
from megatron_rl.tasks import TaskError, TextEncoder

PLAIN, CHAT = TaskSection(name="chain_sum"), TaskSection(name="chain_sum", chat_template=True)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n    {%- if message['role'] == 'user' %}<|im_start|>{{ message.role }}\n"
    "{{ message.content | trim }}{% endif %}{% endfor %}\n{% if add_generation_prompt %}\n<|im_start|>assistant\n{% endif %}\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level tokenizer without merges, which puts <s> before a text, with a chat template."""
    folder = tmp_path_factory.mktemp("model")
    special = ["<s>", "</s>", "<|im_start|>"]
    names = special + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["Ċc"]  # 'Ċ' stands for a newline
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[("Ċ", "c")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        decoders.ByteLevel(),
    )
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))
    return folder


def test_round_trip_and_special_tokens(folder):
    text = TextEncoder(folder, PLAIN)
    ids = text.prompt("a ü=1")
    assert ids[0] == 0 and len(ids) == 7 and text.decode(ids[1:]) == "a ü=1"
    assert text.continuation("a ü=1") == ids[1:]
    assert text.solution("9") == (*text.continuation("9"), 2)
    assert text.eos_ids == (2, 1) and text.num_tokens == 3 + 256 + 1


def test_every_token_with_a_newline_is_found(folder):
    text = TextEncoder(folder, PLAIN)
    assert text.continuation("\nc") == (259,)
    assert set(text.newline_ids) == {259, *text.continuation("\n")}


@pytest.mark.parametrize("as_file", [False, True])
def test_chat_template_is_rendered_as_by_transformers(folder, tmp_path, as_file):
    transformers = pytest.importorskip("transformers")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    if as_file:
        settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
        (tmp_path / "chat_template.jinja").write_text(settings.pop("chat_template"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"bos_token": "<s>"}  # as newer files spell it
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "  what is\n2 + 2? "}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert list(TextEncoder(tmp_path, CHAT).prompt(messages[0]["content"])) == expected
    assert expected.count(0) == 1 and expected.count(2) == 2


def test_folders_that_lack_something(folder, tmp_path):
    with pytest.raises(TaskError, match="cannot be read as a tokenizer"):
        TextEncoder(tmp_path, PLAIN)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(TaskError, match="has eos_token_id"):
        TextEncoder(tmp_path, PLAIN)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 1}}))
    assert TextEncoder(tmp_path, PLAIN).eos_ids == (1,)
    with pytest.raises(TaskError, match="has no chat template"):
        TextEncoder(tmp_path, CHAT)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('users only') }}")
    with pytest.raises(TaskError, match="cannot be rendered .*users only"):
        TextEncoder(tmp_path, CHAT).prompt("x")


def test_truncation_and_padding_of_the_file_are_reset_as_by_transformers(folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    saved = Tokenizer.from_file(str(folder / "tokenizer.json"))
    saved.enable_truncation(max_length=16)
    saved.enable_padding(length=40, pad_id=1, pad_token="</s>")
    saved.save(str(tmp_path / "tokenizer.json"))
    text, prompt = TextEncoder(tmp_path, PLAIN), "What is 12 + 30? " * 5
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert list(text.prompt(prompt)) == theirs(prompt)["input_ids"] and len(text.prompt(prompt)) == 86
    assert list(text.continuation(prompt)) == theirs(prompt, add_special_tokens=False)["input_ids"]
    assert text.solution(prompt)[:-1] == text.continuation(prompt)
    former = TextEncoder(tmp_path, TaskSection(name="chain_sum", former_text=True))
    assert len(former.prompt(prompt)) == 40 and former.prompt(prompt)[:16] == text.prompt(prompt)[:16]


def test_special_tokens_are_kept_in_completions_but_for_those_that_end_or_pad(tmp_path):
    names = ["<s>", "</s>", "<pad>", "<think>", "</think>", "<answer>", "</answer>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names + alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(names)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>", "chat_template": CLOSING}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    keep, strip = (TextEncoder(tmp_path, TaskSection(name="x", chat_template=True, special_tokens=s)) for s in ("keep", "strip"))
    ids = [*keep.continuation("<think>..42</think><answer>42</answer>"), 7, 1, 2, 2]
    assert len(ids) == 4 + 6 + 4
    assert keep.decode(ids) == "<think>..42</think><answer>42</answer>"
    assert strip.decode(ids) == "..4242"
    assert keep.whole_text(ids).endswith("</answer><|im_end|></s><pad><pad>")


CLOSING = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }} <|im_end|>\n{% endfor %}"


def test_solutions_end_with_the_token_that_closes_a_turn_and_all_ids_of_both_files_stop(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"chat_template": CLOSING}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2, end]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    chat = TextEncoder(tmp_path, CHAT)
    assert chat.eos_ids == (1, 2, end, 0)
    assert chat.solution("4")[-1] == end and TextEncoder(tmp_path, PLAIN).solution("4")[-1] == 1
    former = TextEncoder(tmp_path, TaskSection(name="chain_sum", chat_template=True, former_text=True))
    assert former.eos_ids == (1, 2, end) and former.solution("4")[-1] == 1


def test_stop_tokens_are_tokens(folder):
    text = TextEncoder(folder, PLAIN)
    assert text.stop_ids(("</s>", 2, "Ċc")) == (1, 2, 259)
    for wrong in ("no token", 260, -1):
        with pytest.raises(TaskError, match=f"rollouts.stop_tokens has {wrong!r}, which is no token .* from 0 to 259"):
            text.stop_ids((wrong,))


def test_tokens_that_may_complete_a_stop_string(folder):
    text = TextEncoder(folder, PLAIN)
    found = set(text.ids_that_may_complete("ab\nc"))
    assert {259, *text.continuation("c")} <= found and not found & {*text.continuation("a\n")}
    assert set(text.continuation("ü")) <= set(text.ids_that_may_complete("ü"))  # two tokens, each a part of the character


@pytest.mark.parametrize("content", ["[1]", "{", "{" + '"a":{' * 5000])
def test_damaged_settings_are_named(folder, tmp_path, content):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(TaskError, match=r"generation_config\.json: "):
        TextEncoder(tmp_path, PLAIN)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    with pytest.raises(TaskError, match=r"eos_token_id is \['</s>'\]; it must be an id"):
        TextEncoder(tmp_path, PLAIN)
