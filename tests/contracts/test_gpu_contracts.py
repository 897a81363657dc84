"""The program against what the GPU packages' source was found to say (tests/data/gpu_contracts.json).

Says nothing of what a GPU computes. That the facts are still those of the pinned packages is shown by the slow test, which
downloads them (450 MB; into $GPU_CONTRACTS_CACHE if it is set).
"""

import copy
import math
import os
import subprocess
import sys

import pytest

from megatron_rl.inference.vllm.nccl import NcclSender
from megatron_rl.inference.vllm.server import server_command
from megatron_rl.wire.tensor_spec import DTYPE_BYTES
from scripts.contracts import answers, imports, megatron, packing, program, quantisation, serving, spanning, te_models
from scripts.contracts.facts_file import differences
from scripts.contracts.wheels import ROOT, pinned_versions
from tests.contracts.kept import DERIVE, FACTS, cache_folder


def test_the_facts_are_of_the_pinned_versions():
    assert FACTS["versions"] == pinned_versions(), DERIVE


def test_every_import_of_a_gpu_library_is_in_its_source():
    kept = {package: list(lines) for package, lines in FACTS["imports"].items()}
    assert kept == {package: lines for package, lines in program.imports().items() if lines}, DERIVE
    assert imports.missing_in(FACTS["imports"]) == []


def test_servers_take_what_the_program_gives_them():
    facts = FACTS["vllm"]
    assert list(facts["flags"]) == program.server_flags() and list(facts["variables"]) == program.server_variables(), DERIVE
    assert set(facts["routes"]) >= set(program.control_requests()), DERIVE
    for body in program.sampling_requests().values():
        assert set(facts["request"]) >= set(body) and set(facts["sampling_params"]) >= set(body["sampling_params"]), DERIVE
    assert serving.missing_in(facts) == []


def test_no_server_is_started_with_what_vllm_refuses():
    """Routes of a dense model, and a mask without the log-probs that go with it."""
    rules = FACTS["vllm"]["rules"]
    assert rules["routes, MoE"] is None and "only supports MoE" in rules["routes, dense"]
    assert rules["mask, processed log-probs"] is None and "processed_logprobs" in rules["mask, raw log-probs"]
    assert rules["mask, request with top_k"] is None and "top_k > 0" in rules["mask, request without top_k"]
    for settings in program.server_settings():
        argv, _ = server_command(settings)
        assert ("--enable-return-routed-experts" in argv) == settings.has_moe_layers
        assert ("--return-sampling-mask" in argv) == (settings.keep_set_source == "native")
        assert argv[argv.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert program.sampling_requests()["native, truncated"]["sampling_params"]["top_k"] > 0


def test_a_server_that_spans_nodes_has_one_worker_on_each_gpu_and_each_is_in_the_weight_group():
    """By vLLM's own functions from the program's command lines; and what its command does on a node without the head."""
    assert spanning.what_is_not_right(FACTS["vllm"]["spanning"]) == []
    changed = copy.deepcopy(FACTS["vllm"]["spanning"])
    changed["workers"][1][0][2] = 1  # two members of the same rank
    assert len(spanning.what_is_not_right(changed)) == 1


def test_answers_of_their_classes_decode_to_what_was_sampled():
    """0.33's classes and the function that fills them made these; the program's client decodes them, to the bit."""
    assert sorted(FACTS["vllm"]["answers"]) == sorted(answers.CASES), DERIVE
    assert answers.what_does_not_decode(FACTS["vllm"]["answers"]) == []


@pytest.mark.parametrize("field", ["token_id", "start", "sampling_mask", "routed_experts"])
def test_an_answer_without_a_field_is_noticed(field):
    """The comparison itself: a field that a later vLLM renames."""
    changed = copy.deepcopy(FACTS["vllm"]["answers"])
    choice = changed["native, truncated"]["choices"][0]
    holders = {"token_id": choice["logprobs"]["content"][0], "start": choice["weight_versions"][0]}
    del holders.get(field, choice)[field]
    assert len(answers.what_does_not_decode(changed)) == 1


def test_a_pause_drops_the_keys_of_the_requests_that_it_keeps():
    assert FACTS["vllm"]["pause_keep"] == {"clear_cache=true": ["reset_prefix_cache(reset_running_requests=True)"]}


def test_the_announcement_is_cut_as_vllms_packer_cuts_the_stream():
    facts = FACTS["vllm"]["packed"]
    assert packing.misfits(facts) == []
    sender = NcclSender("127.0.0.1", bucket_bytes=facts["bucket_bytes"])
    message = sender.announcement(packing.STREAM, 1)
    buckets, size = [], 0
    for dtype, shape in zip(message["dtype_names"], message["shapes"], strict=True):
        assert shape, "a scalar cannot be viewed as bytes"
        size += math.prod(shape) * DTYPE_BYTES[dtype]
        if size > facts["bucket_bytes"]:
            buckets, size = [*buckets, size], 0
    assert [*buckets, size] == facts["buckets_of_the_stream"]


def test_nvfp4_checkpoints_are_described_in_modelopts_words():
    assert quantisation.differences(FACTS["quantisation"]) == []


def test_megatrons_configuration_has_the_fields_that_the_engine_sets():
    assert list(FACTS["megatron"]["TransformerConfig"]) == program.transformer_settings(), DERIVE
    assert megatron.missing_in(FACTS["megatron"]) == []


@pytest.mark.parametrize("model", te_models.MODELS)
def test_transformer_engines_parameters_are_those_of_the_weight_mapping(model):
    """Name, shape and dtype, but for the sinks: their module holds them in fp32."""
    kept = FACTS["megatron"]["with_transformer_engine"]["parameters"][model]
    layouts = {name: layout for of, name, layout in te_models.cases() if of == model}
    assert list(kept) == list(layouts), DERIVE
    for name, layout in layouts.items():
        expected = te_models.abridged(te_models.mapped(model, layout))
        found = {
            key: value.replace("float32", "bfloat16") if key.endswith("softmax_offset") else value
            for key, value in kept[name].items()
        }
        assert found == expected


def test_only_the_sinks_are_built_otherwise_than_mapped():
    names = FACTS["megatron"]["with_transformer_engine"]["other_than_mapped"]
    assert names and all(name.startswith("gpt_oss") and name.endswith("core_attention.softmax_offset") for name in names)


def test_what_changed_is_named():
    changed = copy.deepcopy(FACTS)
    changed["versions"]["vllm"] = "0.34.0"
    del changed["vllm"]["routes"]["POST /pause"]
    changed["vllm"]["flags"]["--seed"] = False
    lines = list(differences(FACTS, changed))
    assert lines == [
        "versions / vllm: was 0.33.0, is 0.34.0",
        "vllm / flags / --seed: was True, is False",
        f"vllm / routes / POST /pause: was {FACTS['vllm']['routes']['POST /pause']}, is gone",
    ]
    assert sorted(serving.missing_in(changed["vllm"])) == [
        "POST /pause takes no clear_cache in its query",
        "POST /pause takes no mode in its query",
        "flags: vLLM has no --seed",
    ]


@pytest.mark.slow
def test_the_pinned_packages_still_say_so(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "gpu_contracts.py"), "--cache", str(cache_folder(tmp_path)), "--check"]
    result = subprocess.run(
        command, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
