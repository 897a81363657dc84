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
    assert ids[0] == 0 and len(ids) == 7 and text.decode(ids) == "a ü=1"
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
    with pytest.raises(TaskError, match="rejects the prompt: users only"):
        TextEncoder(tmp_path, CHAT).prompt("x")
