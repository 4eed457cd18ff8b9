"""The tools that make what recipes and measurements need: a reward model, reasoning-gym's prompts, a random model."""

import json
import sys
from pathlib import Path

import launch
import pytest
import torch
from models.tiny import tiny_model, tiny_tokenizer
from safetensors.torch import load_file

from megatron_rl.rewards.rules import reasoning_gym
from tools.reasoning_gym_data import rows_of


def test_reward_head_prefers_the_chosen(tmp_path: Path):
    """The folder loads in transformers with the language model's own body; by its logits the chosen ones win."""
    import transformers

    source = tiny_tokenizer(tiny_model(tmp_path / "lm", "llama3"))
    pairs = [(f"say {i} ", f"yes {i} good", f"no {9 - i} bad") for i in range(10)]
    rows = [json.dumps({"prompt": p, "chosen": p + a, "rejected": p + b}) for p, a, b in pairs]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows) + "\n")
    files = ["--train-data", tmp_path / "pairs.jsonl", "--eval-data", tmp_path / "pairs.jsonl"]
    tool = [
        sys.executable,
        launch.ROOT / "tools/reward_head.py",
        "--hf-model",
        source,
        *files,
        "--out",
        tmp_path / "rm",
    ]
    assert "held-out pairs (10): 1.000" in launch.check(launch.run(*tool))
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "rm/model.safetensors")
    assert before.keys() | {"score.weight"} == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "rm")

    def score(text: str) -> float:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            return model(torch.cat([ids, torch.tensor([[tokenizer.eos_token_id]])], dim=1)).logits.item()

    assert all(score(p + a) > score(p + b) for p, a, b in pairs)


def test_reasoning_gym_rows_carry_their_verifier():
    """Every row's own answer scores 1 after a way through JSON; the seed decides; what is unknown is named."""
    rows = list(rows_of("chain_sum:min_terms=2,max_terms=2", 5, 1))
    for row in rows:
        assert reasoning_gym(row["prompt"], row["answer"], json.loads(json.dumps(row))) == 1
        assert reasoning_gym(row["prompt"], "no idea", row) < 0.1 and row["data_source"] == "chain_sum"
    assert rows == list(rows_of("chain_sum:min_terms=2,max_terms=2", 5, 1)) != list(rows_of("chain_sum", 5, 2))
    for wrong in ("chain_sums", "chain_sum:min_term=2", "chain_sum:min_terms=0"):
        with pytest.raises(ValueError, match=wrong):
            list(rows_of(wrong, 1, 1))


def test_random_model(tmp_path: Path):
    """transformers loads the folder with the sizes asked for; what cannot be is one line, and nothing is written."""
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    given = [f"{key}={value}" for key, value in (sizes | {"vocab_size": 512}).items()]

    def run(name: str, *more: object) -> launch.Result:
        tool = launch.ROOT / "tools/random_model.py"
        return launch.run(sys.executable, tool, "qwen2.5-0.5b", "--out", tmp_path / name, *given, *more)

    for wrong, says in (
        (["layers=4"], "layers=4 is no key=value"),
        (["num_attention_heads=5"], "not a multiple of num_attention_heads 5"),
        (["--tokenizer", tmp_path / "none"], "none has no tokenizer files"),
    ):
        done = run("wrong", *wrong)
        assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
        assert not list(tmp_path.iterdir())
    launch.check(run("model"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert {key: getattr(model.config, key) for key in sizes} == sizes
    assert model.config.eos_token_id == 511  # the shape's own, 151645, is beyond this vocabulary
