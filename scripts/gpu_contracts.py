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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from contracts import answers, imports, megatron, packing, quantisation, serving, spanning
from contracts.facts_file import differences, readable
from contracts.wheels import ROOT, SOURCE_PACKAGE, pinned_versions, sources

from megatron_rl.errors import RunError

_LINE = 700
_CHANGED = (RunError, NameError, AttributeError, LookupError, TypeError, ValueError, AssertionError, OSError)
"""What running a library's source raises when it needs more than before, or is no longer there."""
FACTS = ROOT / "tests" / "data" / "gpu_contracts.json"


def main() -> None:
    """Derive, then write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="folder for the downloaded packages; kept between calls")
    parser.add_argument("--check", action="store_true", help="write nothing; compare with the facts that are kept")
    arguments = parser.parse_args()
    arguments.cache.mkdir(parents=True, exist_ok=True)

    versions = pinned_versions()
    facts, problems, failures = derive(versions, sources(versions, arguments.cache.resolve()))
    facts = json.loads(json.dumps(facts))
    problems += [f"not derived: {failure}" for failure in failures]
    if arguments.check:
        kept = json.loads(FACTS.read_text(encoding="utf-8")) if FACTS.exists() else {}
        lost = tuple(failure.partition(": ")[0].removesuffix(" / *") for failure in failures)
        problems += [f"changed: {line}" for line in differences(kept, facts) if not line.startswith(lost)]
    for problem in problems:
        print(problem if len(problem) <= _LINE else f"{problem[:_LINE]} ...")
    if failures and not arguments.check:
        print(f"{FACTS.relative_to(ROOT)} is left as it was, because parts of it could not be derived")
    elif not arguments.check:
        FACTS.write_text(readable(facts) + "\n", encoding="utf-8")
        print(f"{FACTS.relative_to(ROOT)}: {', '.join(f'{name} {version}' for name, version in versions.items())}")
    sys.exit(1 if problems else 0)


def derive(versions: dict[str, str], roots: dict[str, Path]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Run everything, also after a part that fails, so that one call names all that changed.

    Returns:
        The facts; what the program relies on and does not find; parts that could not be derived, with the reason.
    """
    vllm = roots["vllm"]
    warnings.simplefilter("ignore")  # a tensor above the bucket's size is meant
    facts: dict[str, Any] = {"versions": versions}
    problems: list[str] = []
    failures: list[str] = []

    def part(place: str, make: Callable[[], Any], *checks: Callable[[Any], Iterable[str]]) -> None:
        """Facts that are kept at `place`, and what of them the program does not meet."""
        *sections, name = place.split(" / ")
        try:
            found = make()
            problems.extend(problem for check in checks for problem in check(found))
        except _CHANGED as error:
            failures.append(f"{place}: {type(error).__name__}: {error}")
            return
        section = facts
        for outer in sections:
            section = section.setdefault(outer, {})
        section |= {name: found} if name != "*" else found

    part("imports", lambda: imports.import_facts(roots), imports.missing_in)
    part("vllm / *", lambda: serving.serving_facts(vllm), serving.missing_in, lambda _: serving.refused_starts(vllm))
    part("vllm / response", lambda: serving.response_facts(vllm))
    part("vllm / answers", lambda: answers.make_answers(vllm), answers.what_does_not_decode)
    part("vllm / spanning", lambda: spanning.spanning_facts(vllm), spanning.what_is_not_right)
    part("vllm / packed", lambda: packing.packing_facts(vllm), lambda found: packing.what_is_not_received(vllm, found))
    quantised = (roots["nvidia-modelopt"], roots["transformer-engine"])
    part("quantisation", lambda: quantisation.quantisation_facts(*quantised), quantisation.differences)
    part("megatron / *", lambda: megatron.megatron_facts(roots), megatron.missing_in)
    part("megatron / with_transformer_engine", lambda: megatron.run_over_mocked_engine("te_models", roots))
    part("nvfp4", lambda: megatron.run_over_mocked_engine("te_fp4", roots), lambda found: found["problems"])
    part("build", lambda: build_facts(roots[SOURCE_PACKAGE]))
    return facts, problems, failures


def build_facts(source: Path) -> dict[str, Any]:
    """What building Transformer Engine's torch part needs to be there first."""
    (folder,) = source.iterdir()
    system = tomllib.loads((folder / "pyproject.toml").read_text())["build-system"]
    return {"requires": system["requires"], "version": (folder / "build_tools" / "VERSION.txt").read_text().strip()}


if __name__ == "__main__":
    main()
