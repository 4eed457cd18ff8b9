"""Guards the rules the project agreed on: sizes, import order, purity, style. Each failure says what to change."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "megatron_rl"
FOLDERS = ("megatron_rl", "tools", "tests", "examples", "benchmarks")

MAX_FUNCTION_LINES, MAX_FILE_LINES, MAX_FLAGS = 80, 400, 140
MAX_SCRIPT_LINES = {"train_ppo.py": 250, "train_dpo.py": 200}

# A module imports only from modules to its left, from leaves, and from its own folder. Leaves import leaves alone.
LEAVES = ("batch", "platform", "failure", "weights.arch", "weights.layouts")
ORDER = (
    *("initialize", "data", "logprobs_kernel", "logprobs", "offload", "models", "weights", "rollout", "algorithms"),
    *(
        "flag_types",
        "flags",
        "arguments",
        "unused",
        "memory",
        "roles",
        "step",
        "rewards",  # a reward model is a role that takes a step
        "objectives",
        "metrics",
        "reference_cache",
        "builders",
        "report",
        "sampling",
        "evaluate",
        "checkpoint",
    ),
)
FLAG_MODULES = ("flags", "arguments")
PURE = ("batch", "algorithms.*", "weights.arch", "weights.layouts", "weights.plan")  # no megatron, no vllm


def python_files(*folders: str) -> list[Path]:
    inside = [path for folder in folders or FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return sorted(inside if folders else [*inside, *ROOT.glob("*.py")])


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def at(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def module_name(path: Path) -> str:
    """megatron_rl/weights/plan.py -> weights.plan; a folder's __init__.py is the folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    return {module_name(path): path for path in python_files("megatron_rl")}


def imports(node: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """(statement, dotted name) of all that is imported, inside functions too; `from a import b` gives a.b."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((child, alias.name) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from ((child, f"{child.module or ''}.{alias.name}") for alias in child.names)
        else:
            yield from imports(child)


def own_imports(path: Path) -> Iterator[tuple[ast.stmt, str]]:
    """Like imports(), of our modules alone, as names of modules()."""
    for statement, name in imports(tree(path)):
        top, _, rest = name.partition(".")
        if top != "megatron_rl" or not rest:
            continue
        if rest not in modules():
            rest = rest.rpartition(".")[0]  # the last part is something inside the module
        if rest:
            yield statement, rest


def place(module: str) -> int:
    """Position in ORDER; modules without a place, which another test reports, come last."""
    folder = module.partition(".")[0]
    return ORDER.index(folder) if folder in ORDER else len(ORDER)


def test_functions_are_short():
    """Every function is shorter than 80 lines."""
    long = [
        f"{at(path, node)} {node.name}: {node.end_lineno - node.lineno + 1} lines"
        for path in python_files()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 >= MAX_FUNCTION_LINES
    ]
    assert not long, "split:\n" + "\n".join(long)


def test_files_are_short():
    """Every file is shorter than 400 lines, train_ppo.py than 250, train_dpo.py than 200."""
    counts = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in python_files()}
    long = [
        f"{path.relative_to(ROOT)}: {n} lines"
        for path, n in counts.items()
        if n >= (MAX_SCRIPT_LINES.get(path.name, MAX_FILE_LINES) if path.parent == ROOT else MAX_FILE_LINES)
    ]
    assert not long, "split:\n" + "\n".join(long)


def test_every_module_has_a_place():
    """Each module of the package is named in ORDER or LEAVES of this file."""
    known = {name.partition(".")[0] for name in (*ORDER, *LEAVES)} | {""}
    assert [name for name in modules() if name.partition(".")[0] not in known] == []


def test_imports_point_left():
    """A module imports only from modules to its left in ORDER, from leaves and from its own folder."""
    wrong = []
    for name, path in modules().items():
        for statement, target in own_imports(path):
            same_folder = "." in name and target.partition(".")[0] == name.partition(".")[0]
            leaf_breaks = name in LEAVES and target not in LEAVES
            if leaf_breaks or not (target in LEAVES or same_folder or place(target) < place(name)):
                wrong.append(f"{at(path, statement)} {name} imports {target}")
    assert not wrong, "the import order is " + " > ".join(ORDER) + "\n" + "\n".join(wrong)


def test_no_import_cycles():
    """No module imports itself through others, inside functions included."""
    graph = {name: {target for _, target in own_imports(path)} - {name} for name, path in modules().items()}
    while free := [name for name, targets in graph.items() if not targets & graph.keys()]:
        for name in free:
            del graph[name]
    assert not graph, f"these import each other in a circle: {', '.join(graph)}"


def test_pure_modules_need_neither_megatron_nor_vllm():
    """The batch, algorithms, weight table, layouts and planner load neither megatron nor vllm."""
    pure = [n for n in modules() if any(n == p or (p.endswith("*") and n.startswith(p[:-1])) for p in PURE)]
    named = [
        f"{at(modules()[name], statement)} imports {target}"
        for name in pure
        for statement, target in imports(tree(modules()[name]))
        if target.partition(".")[0] in ("megatron", "vllm")
    ]
    assert not named, "\n".join(named)
    code = f"import sys, importlib\nfor n in {pure}: importlib.import_module('megatron_rl.' + n)\n"
    code += "print([m for m in ('megatron', 'vllm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stdout + done.stderr


@pytest.mark.parametrize("script", ["train_ppo", "train_dpo", "tools.estimate_memory", "tools.plan_reshard"])
def test_bad_input_is_met_before_megatron_and_vllm_are_loaded(script: str):
    """Their imports take longer than all checks of flags and data together."""
    code = f"import sys, {script}\nprint([m for m in ('megatron', 'vllm', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stdout + done.stderr


def test_only_platform_asks_for_cuda():
    """`torch.cuda.is_available` is called in platform.py alone: the rest of the package asks platform."""
    asking = [p.name for p in python_files("megatron_rl") if "cuda.is_available" in p.read_text(encoding="utf-8")]
    assert set(asking) <= {"platform.py"}


def test_init_files_are_empty():
    """__init__.py files hold nothing; the package's own holds __version__."""
    for path in PACKAGE.rglob("__init__.py"):
        text = path.read_text(encoding="utf-8")
        if path.parent == PACKAGE:
            assert re.fullmatch(r'(""".*"""\n+)?__version__ = "\d+\.\d+\.\d+"\n', text, re.DOTALL), text
        else:
            assert text.strip() == "", f"{path.relative_to(ROOT)} is not empty"


def test_flag_count():
    """There are at most 140 command-line flags: a new one should replace one, or be a key of --vllm-args."""
    flags = {
        argument.value
        for name in FLAG_MODULES
        if name in modules()
        for node in ast.walk(tree(modules()[name]))
        if isinstance(node, ast.Call)
        for argument in node.args
        if isinstance(argument, ast.Constant) and re.fullmatch(r"--[a-z0-9][a-z0-9-]+", str(argument.value))
    }
    assert 0 < len(flags) <= MAX_FLAGS, f"{len(flags)} flags"


def test_no_bare_except():
    """Exceptions are caught by name, and never all of them only to be passed over."""
    wrong = []
    for path in python_files():
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            if node.type is None or (broad and all(isinstance(s, ast.Pass | ast.Continue) for s in node.body)):
                wrong.append(at(path, node))
    assert not wrong, wrong


def test_no_attribute_guessing():
    """No getattr(x, "name", None): it hides misspelt and renamed attributes."""
    wrong = [
        at(path, node)
        for path in python_files()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "getattr"
        and len(node.args) == 3
        and all(isinstance(argument, ast.Constant) for argument in node.args[1:])
        and node.args[2].value is None
    ]
    assert not wrong, wrong


def test_tests_are_plain_functions_with_a_contract():
    """Tests are functions, not classes, and their docstring states what holds."""
    wrong = []
    for path in python_files("tests"):
        if not path.name.startswith("test_"):
            continue
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                wrong.append(f"{at(path, node)} {node.name} is a class")
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node):
                wrong.append(f"{at(path, node)} {node.name} has no docstring")
    assert not wrong, "\n".join(wrong)


def test_no_private_paths_or_leftovers():
    """No file names somebody's home or work folder, and nothing is left to do in a comment."""
    private = re.compile(r"/(?:root|work|home|Users|mnt)/|\.\./shared\b|\b(?:TO" + r"DO|FIX" + r"ME|X" + r"XX)\b")
    suffixes = {".py", ".sh", ".md", ".txt", ".toml", ".yaml", ".slurm"}
    files = [p for folder in (*FOLDERS, ".ci") for p in (ROOT / folder).rglob("*")]
    files += [p for p in ROOT.iterdir() if not p.name.startswith(".")]
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        if path.is_file() and (path.suffix in suffixes or path.parent.name == ".ci") and path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if private.search(line)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("command", [("check",), ("format", "--check")], ids=["check", "format"])
def test_ruff(command: tuple[str, ...]):
    """ruff's checks (E, F, I, UP, B) and its format hold everywhere."""
    done = subprocess.run([sys.executable, "-m", "ruff", *command, "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
