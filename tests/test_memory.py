"""The memory estimate against what autograd keeps, against runs measured on an H200, and against itself."""

import json
import re
from pathlib import Path

import pytest
import torch
from models.tiny import tiny_model

from megatron_rl.arguments import parse
from megatron_rl.batch import PreferencePair, batch_of_pairs, pack
from megatron_rl.flags import DPO, PPO
from megatron_rl.initialize import Topology
from megatron_rl.logprobs import LogprobOptions, logprob_head
from megatron_rl.memory.activations import Recompute, Training, ends_saved, in_flight, saved
from megatron_rl.memory.estimate import RoleSizes, check_fits, role_state, worst_stage
from megatron_rl.memory.setup import dpo_setup, ppo_setup
from megatron_rl.models.config import ModelOptions, Sizes, read_hf_config
from megatron_rl.models.gpt import build_model, forward
from tools import estimate_memory
from tools.random_model import SHAPES

LAYERS = 3
SMALL = dict(hidden_size=128, num_hidden_layers=LAYERS, intermediate_size=160, num_attention_heads=8)
FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}
CASES = {  # family, type, how it is recomputed, residual stream in float32
    "float32": ("llama", torch.float32, {}, False),
    "bfloat16": ("llama", torch.bfloat16, {}, False),
    "float32 residual": ("llama", torch.bfloat16, {}, True),
    "query and key norms": ("qwen3", torch.bfloat16, {}, False),
    "experts": ("mixtral", torch.float32, {}, False),
    "experts in bfloat16": ("qwen3_moe", torch.bfloat16, {}, False),
    "full": ("llama", torch.float32, FULL | {"recompute_method": "uniform"}, False),
    "full, first layer": ("llama", torch.float32, FULL | {"recompute_method": "block"}, False),
    "attention": ("llama", torch.float32, {"recompute_granularity": "selective"}, False),
    "mlp": ("llama", torch.bfloat16, {"recompute_granularity": "selective", "recompute_modules": ("mlp",)}, False),
}


def kept_by_autograd(chunk: torch.nn.Module, micro: object, head: object) -> int:
    """Bytes of every storage that the backward pass of a forward pass will read, weights left out."""
    weights = {param.untyped_storage().data_ptr() for param in chunk.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    chunk.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = forward(chunk, micro, head)
    assert out.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("case", CASES)
def test_activations_are_what_autograd_keeps(case: str, alone: Topology, tmp_path: Path):
    """The formula on the CPU's kernels is within 5 % of the tensors that the forward pass really saves."""
    family, dtype, recompute, residual = CASES[case]
    hf = read_hf_config(tiny_model(tmp_path, family, **SMALL))
    overrides = {"fp32_residual_connection": residual}
    options = ModelOptions(params_dtype=dtype, random_init=True, overrides=overrides, **recompute)
    (chunk,) = build_model(hf, alone, options)
    pairs = [PreferencePair(i, tuple(range(40)), tuple(range(30)), tuple(range(50))) for i in range(6)]
    micro = pack(batch_of_pairs(pairs), list(range(12)), torch.device("cpu"))
    head = logprob_head(hf.vocab, 0, alone.groups.tp, LogprobOptions(entropy=False))
    real = kept_by_autograd(chunk, micro, head)
    flags = {key.removeprefix("recompute_"): value for key, value in recompute.items()}
    training = Training(
        bf16=dtype == torch.bfloat16,
        fp32_residual=residual,
        tokens=micro.tokens_1T.shape[1],
        recompute=Recompute(**{"layers" if key == "num_layers" else key: value for key, value in flags.items()}),
        cuda=False,
    )
    expected = training.tokens * saved(hf, training, LAYERS)
    expected += ends_saved(hf, training, "lm", is_last=True, predicted=len(micro.predict_K))
    assert expected == pytest.approx(real, rel=0.05)


def written(folder: Path, shape: str) -> Path:
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    return folder


H200 = 150_100_000_000
PPO_RUN = """--reward length --max-prompt-length 64 --kl-coef 0.01 --rollout-batch-size 64 --n-samples-per-prompt 4
    --max-response-length 256 --max-tokens-per-micro-batch 16384 --dry-run"""
DPO_RUN = "--max-length 2048 --max-tokens-per-micro-batch 16384 --global-batch-size 64 --dry-run"


@pytest.mark.parametrize(
    ("script", "more", "measured_gb"),
    [("ppo", "", 99.95), ("ppo", "--fp32-residual-connection", 102.44), ("dpo", "", 66.07)],
)
def test_measured_runs(script: str, more: str, measured_gb: float, tmp_path: Path):
    """Peaks of benchmarks/ppo_h200.txt and dpo_h200.txt are met to 10 %."""
    folder = written(tmp_path, "qwen2.5-1.5b")
    text, groups, setup_of = {"ppo": (PPO_RUN, PPO, ppo_setup), "dpo": (DPO_RUN, DPO, dpo_setup)}[script]
    args = parse(f"train_{script}.py", groups, f"--hf-model {folder} --train-data x {text} {more}".split())
    found = worst_stage(setup_of(args, read_hf_config(folder)), H200)
    assert found.allocated / 1e9 == pytest.approx(measured_gb, rel=0.1)


def test_states_by_hand(tmp_path: Path):
    """bf16: 2 bytes of weights and 4 of gradients whole, 12 of the optimizer over the data-parallel ranks; experts'
    optimizer over fewer ranks."""
    hf = read_hf_config(written(tmp_path, "qwen2.5-1.5b"))
    count = 1_543_714_304
    state = role_state(RoleSizes("policy", hf), Training(dp=8), 0)
    assert state == {"weights": 2 * count, "gradients": 4 * count, "main parameters": count // 2, "moments": count}
    assert role_state(RoleSizes("reference", hf, trains=False), Training(dp=8), 0) == {"weights": 2 * count}
    assert role_state(RoleSizes("policy", hf), Training(bf16=False), 0)["moments"] == 8 * count
    moe = read_hf_config(tiny_model(tmp_path / "moe", "mixtral", **SMALL))
    whole, cut = (role_state(RoleSizes("p", moe), Training(Sizes(ep=ep), dp=2), 0) for ep in (1, 2))
    experts = moe.experts * 3 * moe.hidden * moe.ffn * LAYERS
    assert whole["gradients"] - cut["gradients"] == 4 * experts // 2 and whole["moments"] == cut["moments"]


def test_stages_hold_what_the_schedule_lets_in():
    """1F1B: stage s holds P - s micro-batches, no more than there are; interleaved: 2 (P - s - 1) + (V - 1) P + 1."""
    four = Training(Sizes(pp=4), micro_batches=8)
    assert [in_flight(four, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(Training(Sizes(pp=4), micro_batches=2), 0) == 2
    assert in_flight(Training(Sizes(pp=4, vpp=2), micro_batches=8), 0) == 11


def test_offloaded_parts_are_there_while_their_role_works(tmp_path: Path):
    """Offloaded gradients leave rollout and the other role's update, the optimizer's state also its own role's forward
    and backward pass: it has a phase of its own, without activations."""
    folder = written(tmp_path, "qwen2.5-1.5b")
    flags = f"--hf-model {folder} --train-data x {PPO_RUN}".split()
    plain, away = (
        worst_stage(ppo_setup(parse("train_ppo.py", PPO, [*flags, *more]), read_hf_config(folder)), H200)
        for more in ([], ["--offload-optimizer", "--offload-gradients", "--offload-reference"])
    )
    before, after = ({phase.name: phase.on_device for phase in found.phases} for found in (plain, away))
    assert list(before) == ["rollout", "policy update", "critic update", "reference forward"]
    one = 1_543_714_304  # parameters, of the tied policy and, nearly, of the critic
    assert {name: round((size - after[name]) / one) for name, size in before.items()} == {
        "rollout": 34,
        "policy update": 30,
        "critic update": 30,
        "reference forward": 32,
    }
    assert after.keys() - before.keys() == {"policy step", "critic step"}
    assert after["policy step"] < after["policy update"]


def test_what_does_not_fit_names_flags_that_make_it_fit(tmp_path: Path, capsys: pytest.CaptureFixture):
    """The tool refuses with both sizes; the first flag that it names, added, is accepted."""
    flags = f"--hf-model {written(tmp_path, 'qwen2.5-7b')} --train-data x --max-tokens-per-micro-batch 32768".split()
    with pytest.raises(ValueError, match="policy update needs .* 95% of 80.0 GB are usable; change any of") as error:
        estimate_memory.main(["--gpu-memory-gb", "80", "dpo", "--world-size", "8", *flags])
    ways = str(error.value).split("change any of: ")[1].split(", ")
    assert [way.split()[0] for way in ways] == [
        "--max-tokens-per-micro-batch",
        "--recompute-granularity",
        "--tensor-model-parallel-size",
    ]
    for way in ways[:2]:
        estimate_memory.main(["--gpu-memory-gb", "80", "dpo", "--world-size", "8", *flags, *way.split()[:2]])
        peak = re.search(r"peak: policy update, ([0-9.]+) GB", capsys.readouterr().out)
        assert peak and f"{float(peak[1]):.1f}" in way


def test_rollout_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture):
    """A KV cache too large: the largest that fits is named and accepted, and so is each other way."""
    flags = ["--hf-model", str(written(tmp_path, "qwen2.5-1.5b")), "--train-data", "x", "--world-size", "1"]
    flags += "--reward length --max-tokens-per-micro-batch 2048 --kl-coef 0.01 --advantage-estimator rloo".split()
    flags += "--rollout-batch-size 16 --n-samples-per-prompt 2".split()
    with pytest.raises(ValueError, match="rollout needs .* 95% of 48.0 GB .* change any of") as error:
        estimate_memory.main(["--gpu-memory-gb", "48", "ppo", *flags, "--kv-cache-gb", "12"])
    ways = str(error.value).split("change any of: ")[1].split(", ")
    assert [way.split()[0] for way in ways[:3]] == ["--kv-cache-gb", "--offload-optimizer", "--offload-reference"]
    for way in ways[:3]:
        changed = re.sub(r" \(.*", "", way).split()
        estimate_memory.main(["--gpu-memory-gb", "48", "ppo", *flags, "--kv-cache-gb", "12", *changed])
        peak = re.search(r"peak: .*, ([0-9.]+) GB", capsys.readouterr().out)
        assert peak and f"({float(peak[1]):.1f} GB)" in way
    assert float(ways[0].split()[2].strip("(")) > 0.95 * 48 - 0.2


def test_the_tool_refuses_and_warns_as_the_run_would(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Flags that train_ppo.py refuses are refused, those that nothing reads are named; only config.json is there."""
    flags = ["ppo", "--hf-model", str(written(tmp_path, "qwen2.5-1.5b")), "--train-data", "x", "--world-size", "1"]
    flags += f"{PPO_RUN} --output-dir {tmp_path}/config.json/no --save {tmp_path}/config.json/no".split()
    with pytest.raises(ValueError, match="320 tokens do not fit --max-tokens-per-micro-batch 10"):
        estimate_memory.main(["--gpu-memory-gb", "141", *flags, "--max-tokens-per-micro-batch", "10"])
    estimate_memory.main(["--gpu-memory-gb", "141", *flags, "--lr-decay-iters", "9", "--micro-batch-size", "3"])
    out = capsys.readouterr().out
    assert "960 tokens a micro-batch" in out and "warning: nothing reads --lr-decay-iters" in out


def test_offloading_is_named_where_it_helps(tmp_path: Path):
    """Policy and critic of 1.5 B and an engine on 64 GB: with the idle one's state on the host they fit."""
    folder = written(tmp_path, "qwen2.5-1.5b")
    text = f"--hf-model {folder} --train-data x {PPO_RUN} --max-tokens-per-micro-batch 4096"
    setup = ppo_setup(parse("train_ppo.py", PPO, text.split()), read_hf_config(folder))
    with pytest.raises(ValueError, match="95% of 64.0 GB .* any of: --offload-optimizer --offload-gradients "):
        check_fits(setup, 64_000_000_000, 320)
