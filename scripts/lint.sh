#!/usr/bin/env bash
# The gates that need no run: format, lint rules, types, documentation. Seconds once the caches are warm; the first type check takes
# about a minute. scripts/test.sh and CI run this too.
#
#   bash scripts/lint.sh            # changes nothing; says what fails and how to fix it
#   bash scripts/lint.sh --fix      # runs the formatter and the linter's safe fixes first
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case ${1:-} in
    "" | --fix) ;;
    *) echo "usage: lint.sh [--fix]" >&2; exit 2 ;;
esac
python=${VENV:-.venv}/bin/python
[[ -x $python ]] || { echo "lint: error: there is no $python. Run \`bash scripts/setup.sh\` first." >&2; exit 2; }
failed=()

# Runs one check. Its output is shown only when it fails, followed by what to do about it.
check() {
    local name=$1 remedy=$2
    shift 2
    local output
    if output=$("$@" 2>&1 </dev/null); then
        printf 'lint: %s: ok\n' "$name"
    else
        printf '%s\nlint: %s: FAILED. %s\n' "$output" "$name" "$remedy"
        failed+=("$name")
    fi
}

if [[ ${1:-} == --fix ]]; then
    "$python" -m ruff check --quiet --fix . || true  # what is left is listed below
    "$python" -m ruff format .
fi

by_itself="\`bash scripts/lint.sh --fix\` does it."
check "format (ruff format)" "$by_itself" "$python" -m ruff format --check .
check "rules (ruff check)" "Fix the lines above; \`bash scripts/lint.sh --fix\` does those marked [*]. The rules: pyproject.toml, [tool.ruff.lint]." \
    "$python" -m ruff check --output-format concise .
check "types (mypy)" "Fix the lines above. The settings: pyproject.toml, [tool.mypy]." "$python" -m mypy
if [[ -f mkdocs.yml ]]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    check "links of the documentation (mkdocs)" "Fix the links and anchors that are named above." \
        "$python" -m mkdocs build --strict --site-dir "$site"
fi
if [[ -f scripts/docs.py ]]; then
    check "generated pages (scripts/docs.py)" "\`$python scripts/docs.py\` writes them." "$python" scripts/docs.py --check
fi

((${#failed[@]} == 0)) || { printf 'lint: failed: %s\n' "$(IFS=,; echo "${failed[*]}" | sed 's/,/, /g')"; exit 1; }
