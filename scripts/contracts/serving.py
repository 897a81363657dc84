"""What a vLLM server takes: options, variables, routes, fields of requests; and what it refuses to start with."""

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from megatron_rl.inference.vllm.server import server_command

from .program import control_requests, sampling_requests, server_flags, server_settings, server_variables
from .source import ChangedSourceError, all_fields, execute, fields_of, tree_of

_ARGUMENTS = ("engine/arg_utils.py", "entrypoints/common/cli_args.py", "entrypoints/launchers/cli_args.py")
_START = "entrypoints/openai/api_server.py"


def serving_facts(root: Path) -> dict[str, Any]:
    """For each thing that the program uses, what vLLM has of that name; null where it has nothing."""
    v = root / "vllm"
    options, routes = _options(v), dict(_routes(v))
    variables = set(fields_of_module(v / "envs.py"))
    asked = sampling_requests()
    request = all_fields(v / "entrypoints" / "scale_out" / "token_in_token_out" / "protocol.py", "GenerateRequest")
    sampling = all_fields(v / "sampling_params.py", "SamplingParams")
    return {
        "flags": {flag: flag in options for flag in server_flags()},
        "variables": {name: name in variables for name in server_variables()},
        "routes": {name: routes.get(name) for name in (*control_requests(), "POST /inference/v1/generate", "GET /health")},
        "request": {name: request.get(name) for body in asked.values() for name in body},
        "sampling_params": {name: sampling.get(name) for body in asked.values() for name in body["sampling_params"]},
        "starts_as": "vllm.entrypoints.openai.api_server, as __main__" if _runs_as_main(v / _START) else None,
        "rules": rules(root),
        "pause_keep": _pause_keep(v),
    }


def missing_in(facts: Mapping[str, Any]) -> list[str]:
    """What the program uses and vLLM does not have."""
    sections = ("flags", "variables", "routes", "request", "sampling_params")
    problems = [f"{section}: vLLM has no {name}" for section in sections for name, value in facts[section].items() if not value]
    asked = control_requests()
    for route, sent in asked.items():
        taken = facts["routes"].get(route) or {}
        for kind in ("query", "body"):
            lacking = sorted(set(sent[kind]) - set(taken.get(kind, ())))
            problems += [f"{route} takes no {name} in its {kind}" for name in lacking]
    return problems + ([] if facts["starts_as"] else [f"{_START} is no program any more: inference/vllm/plugin/serve.py runs it"])


def fields_of_module(file: Path) -> Iterator[str]:
    """Names that are annotated at the top of the module, also under an if."""
    return (n.target.id for n in ast.walk(tree_of(file)) if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name))


def _options(v: Path) -> set[str]:
    """All options of the API server: of add_argument, and of the fields that its front end makes options of."""
    found = set()
    for name in _ARGUMENTS:
        file = v / name
        for node in ast.walk(tree_of(file)) if file.exists() else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
                found |= {a.value for a in node.args if isinstance(a, ast.Constant) and str(a.value).startswith("--")}
    fields = all_fields(v / "entrypoints" / "common" / "cli_args.py", "FrontendArgs")
    return found | {"--" + name.replace("_", "-") for name in fields}


def _routes(v: Path) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Pairs of "POST /pause" and the names that it takes in its query and its body."""
    for file in sorted((v / "entrypoints").rglob("*.py")):
        for node in ast.walk(tree_of(file)):
            if not isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef):
                continue
            for call in node.decorator_list:
                if (
                    isinstance(call, ast.Call)
                    and isinstance(call.func, ast.Attribute)
                    and call.func.attr in ("get", "post")
                    and call.args
                ):
                    path = call.args[0]
                    if isinstance(path, ast.Constant):
                        yield f"{call.func.attr.upper()} {path.value}", _parameters(node)


def _parameters(handler: ast.AsyncFunctionDef | ast.FunctionDef) -> dict[str, list[str]]:
    taken: dict[str, list[str]] = {"query": [], "body": []}
    arguments = handler.args
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + list(arguments.defaults)
    for argument, default in zip(arguments.args, defaults, strict=True):
        text = ast.unparse(argument.annotation) if argument.annotation else ""
        text += ast.unparse(default) if default is not None else ""
        for kind, names in taken.items():
            if f"{kind.capitalize()}(" in text:
                names.append(argument.arg)
    for node in ast.walk(handler):  # handlers that read the body by hand
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "body.get" and isinstance(node.args[0], ast.Constant):
            taken["body"].append(str(node.args[0].value))
    return {kind: sorted(names) for kind, names in taken.items()}


def _runs_as_main(file: Path) -> bool:
    return any(isinstance(n, ast.If) and "__main__" in ast.unparse(n.test) for n in tree_of(file).body)


def _pause_keep(v: Path) -> dict[str, Any]:
    """That a pause which keeps its requests drops their keys and values: the calls that _finish_pause makes, and its default."""
    code = execute(v / "v1" / "engine" / "core.py", ["EngineCore._finish_pause", "EngineCore._reset_caches"], {})
    calls: list[str] = []

    def reset(*, reset_running_requests: bool, reset_connector: bool) -> bool:
        calls.append(f"reset_prefix_cache(reset_running_requests={reset_running_requests})")
        return True

    engine = SimpleNamespace(
        model_executor=SimpleNamespace(collective_rpc=lambda name: None),
        reset_prefix_cache=reset,
        reset_mm_cache=lambda: None,
        reset_encoder_cache=lambda: None,
    )
    engine._reset_caches = lambda **given: code._reset_caches(engine, **given)
    code._finish_pause(engine, True)
    return {"clear_cache=true": calls}


def rules(root: Path) -> dict[str, str | None]:
    """By case: why vLLM would not start, or would not take a request; None where it would."""
    v = root / "vllm"
    checks = execute(
        v / "config" / "vllm.py", ["VllmConfig._verify_aux_output_compatibility", "VllmConfig._verify_sampling_replay_config"], {}
    )
    routes, mask = checks._verify_aux_output_compatibility, checks._verify_sampling_replay_config
    request = _request_rule(v / "v1" / "engine" / "input_processor.py")
    return {
        "routes, MoE": _refusal(routes, _config()),
        "routes, dense": _refusal(routes, _config(is_moe=False)),
        "routes, pipeline stages": _refusal(routes, _config(pipeline_parallel_size=2)),
        "routes, no prefix cache": _refusal(routes, _config(enable_prefix_caching=False)),
        "routes, model runner V1": _refusal(routes, _config(use_v2_model_runner=False)),
        "mask, processed log-probs": _refusal(mask, _config()),
        "mask, raw log-probs": _refusal(mask, _config(logprobs_mode="raw_logprobs")),
        "mask, model runner V1": _refusal(mask, _config(use_v2_model_runner=False)),
        "mask, request with top_k": _refusal(request, _config(), SimpleNamespace(temperature=1.0, top_k=4)),
        "mask, request without top_k": _refusal(request, _config(), SimpleNamespace(temperature=1.0, top_k=0)),
    }


def refused_starts(root: Path) -> list[str]:
    """Servers and requests of the program that vLLM would refuse, of every kind."""
    v = root / "vllm"
    names = {
        "--enable-return-routed-experts": "_verify_aux_output_compatibility",
        "--return-sampling-mask": "_verify_sampling_replay_config",
    }
    checks = execute(v / "config" / "vllm.py", [f"VllmConfig.{name}" for name in names.values()], {})
    request = _request_rule(v / "v1" / "engine" / "input_processor.py")
    problems = []
    for settings in server_settings():
        argv = server_command(settings)[0]
        mode = argv[argv.index("--logprobs-mode") + 1]
        config = _config(is_moe=settings.has_moe_layers, logprobs_mode=mode)
        refusals = [_refusal(getattr(checks, name), config) for flag, name in names.items() if flag in argv]
        if "--return-sampling-mask" in argv:
            asked = sampling_requests()["native, truncated"]["sampling_params"]
            refusals.append(_refusal(request, config, SimpleNamespace(**asked)))
        what = (
            f"a server with {'experts' if settings.has_moe_layers else 'no experts'} and keep-sets by {settings.keep_set_source}"
        )
        problems += [f"{what}: {refusal}" for refusal in refusals if refusal]
    return sorted(set(problems))


def _config(**changes: Any) -> SimpleNamespace:
    """As much of a VllmConfig as the rules look at; what a rule comes to need in addition is an AttributeError that names it."""
    values = {
        "use_v2_model_runner": True, "runner_type": "generate", "is_moe": True, "enable_prefix_caching": True, "logprobs_mode":
        "processed_logprobs", "pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1,
        "is_diffusion": False, "logits_processors": None, "return_sampling_mask": True, "enabled": True,
    } | changes  # fmt: skip
    part = SimpleNamespace(**values)
    return SimpleNamespace(
        use_v2_model_runner=values["use_v2_model_runner"], model_config=part, cache_config=part, parallel_config=part,
        aux_output_config=part, speculative_config=None, kv_transfer_config=None, ec_transfer_config=None,
    )  # fmt: skip


def _refusal(rule: Any, config: SimpleNamespace, *arguments: Any) -> str | None:
    platforms = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(is_tpu=lambda: False, is_out_of_tree=lambda: False)
    try:
        with patch.dict(sys.modules, {"vllm": ModuleType("vllm"), "vllm.platforms": platforms}):
            rule(config, *arguments)
    except ValueError as error:
        return str(error)
    except AttributeError as error:
        raise ChangedSourceError(
            f"a start-up rule of vLLM looks at more than before ({error}); extend _config in {__file__}"
        ) from error
    return None


def _request_rule(file: Path) -> Any:
    """What vLLM checks of each request of a server with masks: one statement of a longer function."""
    wanted = "self.model_config.return_sampling_mask"
    found = [n for n in ast.walk(tree_of(file)) if isinstance(n, ast.If) and ast.unparse(n.test) == wanted]
    if len(found) != 1:
        raise ChangedSourceError(f"{file} has {len(found)} statements `if {wanted}`; one was expected")
    namespace: dict[str, Any] = {}
    function = ast.parse("def check(self, params): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = [found[0]]
    exec(compile(ast.fix_missing_locations(ast.Module([function], [])), str(file), "exec"), namespace)
    return namespace["check"]


def response_facts(root: Path) -> dict[str, dict[str, str]]:
    """Fields of the classes that an answer is made of, those that the program reads."""
    protocol = root / "vllm" / "entrypoints" / "scale_out" / "token_in_token_out" / "protocol.py"
    read = {
        "GenerateTokensChoice": ("finish_reason", "token_ids", "routed_experts", "sampling_mask", "weight_versions", "logprobs"),
        "GenerateLogProbs": ("content",),
        "GenerateLogProbsContent": ("token_id", "logprob", "top_logprobs"),
        "GenerateLogProb": ("token_id", "logprob"),
    }
    facts = {name: {f: all_fields(protocol, name).get(f) for f in fields} for name, fields in read.items()}
    spans = fields_of(root / "vllm" / "outputs.py", "WeightVersionSpan")
    return facts | {"WeightVersionSpan": spans}
