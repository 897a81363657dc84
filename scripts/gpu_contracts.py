"""What the GPU packages' source says of everything that this program relies on there, kept as facts in tests/data.

    .venv/bin/python scripts/gpu_contracts.py --cache DIR           derives the facts and writes them
    .venv/bin/python scripts/gpu_contracts.py --cache DIR --check   derives them and says what differs from those that are kept

DIR takes the packages (about 450 MB, by `pip download`; nothing is installed). After a change of a version in pyproject.toml,
`--check` names what changed in the libraries, and either form names what the program relies on and no longer finds; then the
status is 1.

What it cannot show: anything that a GPU computes, the order of CUDA streams, and code of the libraries that is not executed here.
"""

import argparse
import json
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

from contracts import answers, imports, megatron, packing, quantisation, serving
from contracts.facts_file import differences, readable
from contracts.wheels import ROOT, SOURCE_PACKAGE, pinned_versions, sources

FACTS = ROOT / "tests" / "data" / "gpu_contracts.json"


def main() -> None:
    """Derive, then write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="folder for the downloaded packages; kept between calls")
    parser.add_argument("--check", action="store_true", help="write nothing; compare with the facts that are kept")
    arguments = parser.parse_args()
    arguments.cache.mkdir(parents=True, exist_ok=True)

    versions = pinned_versions()
    facts, problems = derive(versions, sources(versions, arguments.cache.resolve()))
    facts = json.loads(json.dumps(facts))
    if arguments.check:
        kept = json.loads(FACTS.read_text(encoding="utf-8")) if FACTS.exists() else {}
        problems += [f"changed: {line}" for line in differences(kept, facts)]
    for problem in problems:
        print(problem)
    if not arguments.check:
        FACTS.write_text(readable(facts) + "\n", encoding="utf-8")
        print(f"{FACTS.relative_to(ROOT)}: {', '.join(f'{name} {version}' for name, version in versions.items())}")
    sys.exit(1 if problems else 0)


def derive(versions: dict[str, str], roots: dict[str, Path]) -> tuple[dict[str, Any], list[str]]:
    """The facts, and what the program relies on and does not find."""
    vllm = roots["vllm"]
    warnings.simplefilter("ignore")  # a tensor above the bucket's size is meant
    facts: dict[str, Any] = {"versions": versions, "imports": imports.import_facts(roots), "vllm": serving.serving_facts(vllm)}
    facts["vllm"] |= {"response": serving.response_facts(vllm), "answers": answers.make_answers(vllm)}
    facts["vllm"]["packed"] = packing.packing_facts(vllm)
    facts["quantisation"] = quantisation.quantisation_facts(roots["nvidia-modelopt"], roots["transformer-engine"])
    facts["megatron"] = megatron.megatron_facts(roots)
    facts["build"] = build_facts(roots[SOURCE_PACKAGE])
    problems = [
        *imports.missing_in(facts["imports"]),
        *serving.missing_in(facts["vllm"]),
        *serving.refused_starts(vllm),
        *answers.what_does_not_decode(facts["vllm"]["answers"]),
        *packing.what_is_not_received(vllm, facts["vllm"]["packed"]),
        *quantisation.differences(facts["quantisation"]),
        *megatron.missing_in(facts["megatron"]),
    ]
    return facts, problems


def build_facts(source: Path) -> dict[str, Any]:
    """What building Transformer Engine's torch part needs to be there first."""
    (folder,) = source.iterdir()
    system = tomllib.loads((folder / "pyproject.toml").read_text())["build-system"]
    return {"requires": system["requires"], "version": (folder / "build_tools" / "VERSION.txt").read_text().strip()}


if __name__ == "__main__":
    main()
