"""The recipes: shell that parses, flags that exist, layouts that fit the models they are written for."""

import json
import re
import sys
from pathlib import Path

import launch
import pytest

EXAMPLES = launch.ROOT / "examples"
SCRIPTS = sorted([*EXAMPLES.glob("*.sh"), *EXAMPLES.glob("*.slurm")])

LLAMA3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "sliding_window": 131072,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN25_14B = QWEN25_7B | {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "max_window_layers": 48,
}
RECIPES = {  # recipe -> (config.json of its model, ranks)
    "ppo_llama3_8b_8gpu.sh": (LLAMA3_8B, 8),
    "grpo_qwen2.5_7b_8gpu.sh": (QWEN25_7B, 8),
    "ppo_two_nodes.sh": (QWEN25_14B, 16),
    "dpo_llama3_8b_8gpu.sh": (LLAMA3_8B, 8),
    "rloo_qwen2.5_7b_8gpu.sh": (QWEN25_7B, 8),
    "dapo_qwen2.5_7b_8gpu.sh": (QWEN25_7B, 8),
    "ppo_reward_model_llama3_8b_8gpu.sh": (LLAMA3_8B, 8),
    "reasoning_gym_qwen2.5_7b_8gpu.sh": (QWEN25_7B, 8),
}
ON_THE_CPU = ("quickstart.sh", *(path.name for path in sorted(EXAMPLES.glob("*_cpu.sh"))))
NEED_NO_DRY_RUN = {*ON_THE_CPU, "ppo_two_nodes.slurm"}  # tested below by themselves


def dry_run(recipe: str, config: dict, folder: Path, *flags: str) -> launch.Result:
    """Runs a recipe with DRY_RUN=1 on a folder that holds nothing but config.json."""
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text(json.dumps(config))
    (folder / "prompts.jsonl").write_text('{"prompt": "What is 2 + 3?", "label": "5"}\n')
    env = {
        "DRY_RUN": "1",
        "PYTHON": sys.executable,
        "HF_MODEL": str(folder / "model"),
        "TRAIN_DATA": str(folder / "prompts.jsonl"),
        "RDZV_HOST": "node0",
        "REWARD_MODEL": str(folder / "model"),
        "DATA_DIR": str(folder),
        "ROWS": "2",  # of each reasoning-gym task
        "EVAL_ROWS": "2",
    }
    return launch.run("bash", EXAMPLES / recipe, *flags, env=env, timeout=280)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shell_parses(script: Path):
    """bash reads the script without complaint, and one torchrun line starts the training."""
    launch.check(launch.run("bash", "-n", script))
    code = [line for line in script.read_text().splitlines() if not line.lstrip().startswith("#")]
    starts = [line for line in code if re.search(r"\btorchrun\b|ppo_two_nodes\.sh", line)]
    assert len(starts) == 1, starts


def test_every_recipe_is_listed():
    """No recipe goes untested."""
    assert {script.name for script in SCRIPTS} == RECIPES.keys() | NEED_NO_DRY_RUN


@pytest.mark.parametrize("recipe", RECIPES)
def test_dry_run(recipe: str, tmp_path: Path):
    """The flags are known, read and valid for the model's true dimensions, and the layout is printed."""
    config, ranks = RECIPES[recipe]
    out = launch.check(dry_run(recipe, config, tmp_path))
    assert f"{ranks} ranks" in out, out
    assert "nothing reads" not in out, out


def test_dry_run_finds_what_does_not_fit(tmp_path: Path):
    """A flag behind the recipe wins over its own; a layout that does not fit ends in one line with the numbers."""
    recipe = "grpo_qwen2.5_7b_8gpu.sh"
    result = dry_run(recipe, QWEN25_7B, tmp_path, "--tensor-model-parallel-size", "8")
    assert result.returncode != 0
    assert "28" in result.stderr and "8" in result.stderr and "Traceback" not in result.stderr, result.tail


@pytest.mark.parametrize("variable", ["HF_MODEL", "TRAIN_DATA", "RDZV_HOST"])
def test_missing_path_is_named(variable: str):
    """A recipe started without one of its variables says which."""
    env = {"HF_MODEL": "model", "TRAIN_DATA": "data.jsonl", "RDZV_HOST": "node0"} | {variable: ""}
    result = launch.run("bash", EXAMPLES / "ppo_two_nodes.sh", env=env)
    assert result.returncode != 0 and f"{variable}: the " in result.stderr


@pytest.mark.skipif(Path(sys.prefix) != launch.ROOT / ".venv", reason="the recipes use .venv, this runs elsewhere")
@pytest.mark.parametrize("recipe", ON_THE_CPU)
def test_dry_run_on_the_cpu(recipe: str, smollm2: Path):
    """The flags are valid for the model that the recipe unpacks; its environment and model are reused in seconds."""
    result = launch.run("bash", EXAMPLES / recipe, env={"DRY_RUN": "1"}, timeout=280)
    out = launch.check(result)
    assert "2 ranks" in out and "nothing reads" not in out, out


def test_slurm_recipe_starts_the_other_one():
    """The batch script runs ppo_two_nodes.sh on each node and gives it every variable that it asks for."""
    text = (EXAMPLES / "ppo_two_nodes.slurm").read_text()
    assert re.search(r"^srun .*bash examples/ppo_two_nodes\.sh \"\$@\"$", text, re.MULTILINE)
    asked = set(re.findall(r"\bRDZV_\w+", (EXAMPLES / "ppo_two_nodes.sh").read_text()))
    exported = re.search(r"^export (.*)$", text, re.MULTILINE).group(1).split()
    assert asked == set(exported)
