"""Checkpoints of real megatron models and optimizers, saved in one layout and loaded in another."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import launch
import pytest
import torch
from models.tiny import tiny_model, tiny_tokenizer
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

PROGRAM = "tests/checkpoint_program.py"


def flags(model: Path, tp: int = 1, pp: int = 1, *more: object) -> list[str]:
    layout = ["--tensor-model-parallel-size", tp, "--pipeline-model-parallel-size", pp]
    fixed = ["--hf-model", model, "--train-data", "none", "--lr", "1e-2", *layout]
    return [str(word) for word in (*fixed, *more)]


def tensors(role: Path, vocab: int = 131) -> dict[str, torch.Tensor]:
    """Every tensor of a role's folder, read by torch alone; of vocabularies the real rows."""
    reader = dcp.FileSystemReader(role)
    found = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in found.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return {k: v[:vocab] if "embedding" in k or ("output_layer" in k and len(v) > 1) else v for k, v in state.items()}


def assert_same(first: Path, second: Path) -> int:
    """Two roles' folders hold the same names and the same numbers, weights and optimizer; how many they are."""
    a, b = tensors(first), tensors(second)
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
    differ = [name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])]
    assert not differ, differ
    assert any(name.startswith("optimizer.state.exp_avg_sq") for name in a)
    return len(a)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama with a tied embedding and four layers."""
    folder = tmp_path_factory.mktemp("model")
    return tiny_tokenizer(tiny_model(folder, "llama3", num_hidden_layers=4))


def play(torchrun: Callable[..., str], folder: Path, ranks: int, scenes: list[dict], timeout: float = 280) -> str:
    plan = folder / f"plan_{ranks}.json"
    plan.write_text(json.dumps(scenes))
    return torchrun(ranks, PROGRAM, plan, timeout=timeout)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_layouts_exchange_weights_and_optimizer(torchrun, tmp_path, model):
    """TP2 -> PP2 -> PP2 with two chunks -> DP2 -> one rank keep every bit, and TP2 goes on from there as it would."""
    a, b, c, d, e, f = (tmp_path / name for name in "abcdef")
    scenes = [
        ("TP2", flags(model, 2, 1, "--save", a, "--save-interval", 1), 3),
        ("PP2", flags(model, 1, 2, "--load", a / "iter_0000002", "--save", b), 0),
        ("VPP", flags(model, 1, 2, "--num-virtual-stages-per-pipeline-rank", 2, "--load", b, "--save", c), 0),
        ("DP2", flags(model, 1, 1, "--load", c, "--save", d, "--async-save"), 0),
        ("TP2 again", flags(model, 2, 1, "--load", d, "--save", f), 1),
        ("other optimizer", flags(model, 1, 2, "--no-use-distributed-optimizer", "--save", tmp_path / "g"), 1),
        ("and back", flags(model, 1, 1, "--no-use-distributed-optimizer", "--load", tmp_path / "g", "--save", e), 0),
    ]
    keys = ("name", "flags", "steps")
    broken = a / "iter_0000003" / "critic" / "__1_0.distcp"
    flipped = {"name": "broken", "flags": flags(model, 2, 1, "--load", a), "flip": str(broken)}
    plan = [dict(zip(keys, scene, strict=True)) for scene in scenes]
    many = tmp_path / "many"  # gradient buckets, each of them spread over both ranks
    plan.append({"name": "buckets", "flags": flags(model, 1, 1, "--save", many, "--overlap-grad-reduce"), "steps": 2})
    plan[-1]["bucket"] = 5000
    out = play(torchrun, tmp_path, 2, [*plan, flipped])
    assert f"broken: warning: iter_0000003 is broken: {broken} is corrupted" in out
    assert f"broken: [load] {a / 'iter_0000002'}: step 2" in out
    for other in (b, c, d):
        for role in ("policy", "critic"):
            assert assert_same(a / "iter_0000002" / role, other / "iter_0000002" / role) > 50
    for role in ("policy", "critic"):
        saved = tensors(many / "iter_0000002" / role)
        for name in (name for name in saved if not name.startswith("optimizer.")):
            assert torch.equal(saved[f"optimizer.state.param.{name}"].to(saved[name].dtype), saved[name]), name
        assert_same(a / "iter_0000003" / role, f / "iter_0000003" / role)
        assert_same(tmp_path / "g" / "iter_0000001" / role, e / "iter_0000001" / role)
    assert "PP2: [load]" in out and "optimizer step 2" in out and "TP 2 -> 1" in out
    one = tmp_path / "one"
    play(torchrun, tmp_path, 1, [{"name": "DP1", "flags": flags(model, 1, 1, "--load", d, "--save", one)}])
    assert_same(d / "iter_0000002" / "policy", one / "iter_0000002" / "policy")


@pytest.mark.slow
def test_export_of_a_trained_layout_is_that_of_one_rank(torchrun, tmp_path, model):
    """What TP2 PP2 with two chunks a stage trained and exported is, bitwise, what one rank exports of its checkpoint,
    and what the converter makes of it."""
    here, one = tmp_path / "here", tmp_path / "one"
    layout = flags(model, 2, 2, "--num-virtual-stages-per-pipeline-rank", 2, "--save", tmp_path / "save")
    play(torchrun, tmp_path, 4, [{"name": "trains", "flags": layout, "steps": 2, "export": str(here)}])
    loads = flags(model, 1, 1, "--load", tmp_path / "save")
    play(torchrun, tmp_path, 1, [{"name": "one rank", "flags": loads, "export": str(one)}])
    before = load_file(model / "model.safetensors")
    for role in ("policy", "critic"):
        tool = launch.ROOT / "tools/convert_megatron_to_hf.py"
        back = ("--load", tmp_path / "save", "--save", tmp_path / "tool" / role, "--role", role)
        launch.check(launch.run(sys.executable, tool, *back))
        folders = [folder / role for folder in (here, one, tmp_path / "tool")]
        first, *others = (load_file(folder / "model.safetensors") for folder in folders)
        for other in others:
            assert first.keys() == other.keys()
            assert all(first[k].dtype == other[k].dtype and torch.equal(first[k], other[k]) for k in first)
        configs = {(folder / "config.json").read_text() for folder in folders}
        assert len(configs) == 1
        trained = [k for k in first if k not in before or not torch.equal(before[k].to(first[k].dtype), first[k])]
        assert len(trained) > 0.9 * len(first), "the run changed the weights"


@pytest.mark.slow
def test_experts_over_ranks_and_back(torchrun, tmp_path):
    """A mixture of experts trained with EP 2 keeps weights and optimizer when it is loaded with EP 1."""
    model = tiny_tokenizer(tiny_model(tmp_path / "model", "mixtral", num_hidden_layers=2))
    a, b = tmp_path / "a", tmp_path / "b"
    experts = ("--expert-model-parallel-size", 2, "--advantage-estimator", "grpo", "--n-samples-per-prompt", 2)
    scenes = [
        {"name": "EP2", "flags": flags(model, 1, 1, *experts, "--save", a), "steps": 1},
        {"name": "EP1", "flags": flags(model, 1, 1, "--advantage-estimator", "grpo", "--load", a, "--save", b)},
    ]
    play(torchrun, tmp_path, 2, scenes)
    assert_same(a / "iter_0000001" / "policy", b / "iter_0000001" / "policy")
    before = load_file(model / "model.safetensors")["model.layers.0.self_attn.o_proj.weight"]
    after = tensors(b / "iter_0000001" / "policy")["decoder.layers.0.self_attention.linear_proj.weight"]
    assert not torch.equal(before.to(after.dtype), after)


@pytest.mark.slow
def test_a_disk_that_refuses_leaves_the_earlier_checkpoint(torchrun, tmp_path, model):
    """A full disk or a folder that cannot be stops the run with the reason; the earlier checkpoint stays whole."""
    full, nowhere = tmp_path / "full", model / "config.json" / "checkpoints"
    saving = ("--save-interval", 1, "--keep-last", 1, "--save")
    scenes = [
        {"name": "full", "flags": flags(model, 1, 1, *saving, full), "steps": 2, "limit": 200_000, "error": True},
        {"name": "async", "flags": flags(model, 1, 1, *saving, full, "--async-save"), "steps": 2, "error": True}
        | {"limit": 200_000},
        {"name": "nowhere", "flags": flags(model, 1, 1, *saving, nowhere), "steps": 1, "error": True},
        {"name": "after", "flags": flags(model, 1, 1, "--load", full)},
    ]
    out = play(torchrun, tmp_path, 1, scenes)
    for name in ("full", "async"):
        assert f"{name}: OSError: the checkpoint could not be written" in out
    assert "File too large" in out and f"earlier ones in {full} are whole" in out
    assert "nowhere: OSError" in out and "Not a directory" in out
    assert "after: [load]" in out and "step 1, policy weights, optimizer and schedule" in out
    assert sorted(path.name for path in full.glob("iter_*")) == ["iter_0000001"]


@pytest.mark.slow
def test_roles_from_folders_of_every_kind(torchrun, tmp_path, model):
    """A converted checkpoint is weights in any layout; critics come from score.weight, a causal LM or a checkpoint."""
    scored = tiny_model(tmp_path / "scored", "llama3", "SequenceClassification", num_hidden_layers=4)
    wrong = tiny_model(tmp_path / "wrong", "llama3", "SequenceClassification", num_hidden_layers=4, num_labels=1)
    weights = load_file(wrong / "model.safetensors")
    save_file(weights | {"score.weight": torch.zeros(1, 64)}, wrong / "model.safetensors", metadata={"format": "pt"})
    for source, name in ((model, "lm"), (scored, "value")):
        tool = launch.ROOT / "tools/convert_hf_to_megatron.py"
        launch.check(launch.run(sys.executable, tool, "--hf-model", source, "--save", tmp_path / name))
    lm, value = tmp_path / "lm", tmp_path / "value" / "iter_0000000" / "critic"
    scenes = [
        ("fp32", ["--no-bf16", "--load", lm, "--critic-hf-model", scored], "a"),
        ("checkpoint", ["--no-bf16", "--critic-hf-model", value], "b"),
        ("language model", ["--no-bf16", "--critic-hf-model", lm / "iter_0000000" / "policy"], "c"),
        ("wrong head", ["--critic-hf-model", wrong], "d"),
    ]
    plan = [
        {"name": name, "flags": flags(model, 2, 1, *more, "--save", tmp_path / save), "error": True}
        for name, more, save in scenes
    ]
    out = play(torchrun, tmp_path, 2, plan)
    assert "fp32: [load]" in out and "step 0, policy weights; critic as its folder has it" in out
    assert "wrong head: ValueError" in out and "score.weight is (1, 64), not (1, 128)" in out
    mine = {name: tensors(tmp_path / name / "iter_0000000" / "critic") for name in "abc"}
    head = load_file(scored / "model.safetensors")["score.weight"]
    assert torch.equal(mine["a"]["output_layer.weight"], head) and torch.equal(mine["b"]["output_layer.weight"], head)
    assert head.any() and not mine["c"]["output_layer.weight"].any()  # a new head is zero
    assert mine["a"].keys() == mine["b"].keys() == mine["c"].keys()
    assert all(torch.equal(mine["a"][name], mine["b"][name]) for name in mine["a"])
    source, policy = load_file(model / "model.safetensors"), tensors(tmp_path / "a" / "iter_0000000" / "policy")
    assert torch.equal(policy["embedding.word_embeddings.weight"], source["model.embed_tokens.weight"])
