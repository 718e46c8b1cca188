"""The shape of the project: short functions, imports in one direction, and documents that name what exists."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from equivtests.adapters.builtin import BUILTIN
from equivtests.chapters.plan import claims_of

CHECKOUT = Path(__file__).parent.parent
PACKAGE = CHECKOUT / "equivtests"
DOCUMENTS = sorted([*CHECKOUT.glob("*.md"), *CHECKOUT.glob("docs/**/*.md")])

LONGEST = 60
TYPICAL = 10

IMPORTS = {
    "errors": "",
    "own": "errors",
    "cases": "errors own",
    "record": "errors cases",
    "models": "cases own",
    "reference": "errors cases own",
    "ranks": "errors own cases record adapters",
    "adapters": "cases record models reference",
    "judge": "own cases record reference adapters",
    "explain": "errors cases record reference judge ranks",
    "chapters": "errors own cases record reference adapters ranks judge explain",
    "mutants": "errors cases record models reference adapters ranks judge chapters",
    "report": "own cases reference chapters judge",
    "cli": "campaign errors own cases reference adapters ranks judge explain chapters report",
    "campaign": "errors chapters judge ranks report",
    "suite": "campaign chapters explain mutants report",
    "plugin": "errors cases adapters ranks judge suite",
    "__main__": "cli",
    "__init__": "",
}
"""What each part of the package may import, but for type checkers. Every part stands above those that it may import."""


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def modules() -> list[Path]:
    """The package's modules, without the test modules that pytest collects."""
    return [path for path in sorted(PACKAGE.rglob("*.py")) if not path.name.startswith("test_")]


def named(path: Path) -> str:
    """The dotted name of a module of the package."""
    parts = path.relative_to(CHECKOUT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(name: str) -> str:
    return name.split(".")[1] if "." in name else "__init__"


def running(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below a node but those that are there for type checkers only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from running(child)


def imported(path: Path) -> set[str]:
    """Dotted names of the modules that a module imports, wherever in it."""
    known = {named(p) for p in PACKAGE.rglob("*.py")}
    found = set()
    for node in running(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & known) or {node.module}
    return found


def own(path: Path) -> set[str]:
    return {name for name in imported(path) if name.split(".")[0] == "equivtests"}


# ---------------------------------------------------------------------------------------------- code


def test_functions_are_short() -> None:
    lengths = {
        f"{path.relative_to(CHECKOUT)}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(tree(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert {where: length for where, length in lengths.items() if length > LONGEST} == {}
    assert statistics.median(lengths.values()) <= TYPICAL


def test_only_the_plugin_imports_pytest() -> None:
    users = {str(path.relative_to(PACKAGE)) for path in modules() if "pytest" in imported(path)}
    assert users == {"plugin.py"}


def test_parts_import_in_one_direction() -> None:
    against = {
        (str(path.relative_to(PACKAGE)), part_of(name))
        for path in modules()
        for name in own(path)
        if part_of(name) not in (*IMPORTS[part_of(named(path))].split(), part_of(named(path)), "__init__")
    }
    assert against == set()


def test_the_direction_of_imports_has_no_circle() -> None:
    order = list(TopologicalSorter({part: allowed.split() for part, allowed in IMPORTS.items()}).static_order())
    assert set(order) == {part_of(named(path)) for path in modules()}


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert list(TopologicalSorter({named(path): own(path) - {named(path)} for path in modules()}).static_order())


def test_nothing_executes_what_it_reads() -> None:
    """Pipes to ranks, which the suite itself started, are all that carries pickles."""
    for path in modules():
        called = {ast.unparse(node.func) for node in ast.walk(tree(path)) if isinstance(node, ast.Call)}
        where = path.relative_to(CHECKOUT)
        assert not called & {"eval", "exec", "compile", "__import__"}, where
        assert not {name.split(".")[0] for name in imported(path)} & {
            "pickle",
            "dill",
            "cloudpickle",
            "marshal",
            "shelve",
        }
        loads = [n for n in ast.walk(tree(path)) if isinstance(n, ast.Call) and ast.unparse(n.func) == "torch.load"]
        assert all("weights_only=True" in map(ast.unparse, call.keywords) for call in loads), where


# ---------------------------------------------------------------------------------------------- documents


def readme_strategies() -> set[str]:
    """The names in the first column of the README's table of what is certified."""
    table = (CHECKOUT / "README.md").read_text().partition("| strategies | what |\n")[2].partition("\n\n")[0]
    return {name for line in table.splitlines()[1:] for name in re.findall(r"`([^`]+)`", line.split("|")[1])}


def test_the_readme_lists_the_strategies_that_exist() -> None:
    assert readme_strategies() == {s.name for spec in BUILTIN for s in claims_of(spec).strategies}


def links(document: Path) -> list[str]:
    """Targets of the links of a document that lie in this project."""
    targets = re.findall(r"\]\(([^)\s]+)\)", document.read_text())
    return [target.partition("#")[0] for target in targets if "://" not in target and not target.startswith("#")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(CHECKOUT)))
def test_links_in_documents_lead_to_files(document: Path) -> None:
    assert [target for target in links(document) if not (document.parent / target).exists()] == []


def test_every_finding_is_listed() -> None:
    index = CHECKOUT / "docs/findings/README.md"
    listed = {(index.parent / target).resolve() for target in links(index)}
    findings = {path.resolve() for path in CHECKOUT.glob("docs/findings/*.md")} - {index.resolve()}
    assert findings and findings == listed


def test_other_peoples_tests_start_without_torch() -> None:
    """The plugin of an installed equivtests is loaded by every pytest run of its users."""
    loaded = "import sys, equivtests.plugin; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], cwd=CHECKOUT, check=False).returncode == 0


def test_the_tutorial_shows_the_adapter_as_it_is() -> None:
    shown = re.findall(r"```python\n(.*?)```", (CHECKOUT / "docs/tutorial.md").read_text(), re.DOTALL)
    parts = ("adapters/accelerate.py", "adapters/accelerate_accumulate.py", "mutants/outside/accelerate.py")
    code = "".join((PACKAGE / part).read_text() for part in parts)
    assert len(shown) >= 5 and [block for block in shown if block not in code] == []


def test_adapters_of_outside_frameworks_are_short() -> None:
    """What a user has to write; model code apart."""
    lengths = {path.name: len(path.read_text().splitlines()) for path in outside_adapters()}
    assert min(lengths.values()) <= 60 and max(lengths.values()) <= 150, lengths


def outside_adapters() -> list[Path]:
    """The modules that import a framework which is not torch."""
    frameworks = {"accelerate", "deepspeed", "jax", "lightning_fabric", "megatron", "transformers"}
    names = {path: {name.split(".")[0] for name in imported(path)} for path in (PACKAGE / "adapters").glob("*.py")}
    return [path for path, used in names.items() if used & frameworks and not path.stem.endswith("_models")]
