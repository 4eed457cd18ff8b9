"""The colocated engine on real vLLM: weights, log-probabilities, seeds and refusals, on one and several processes."""

import shutil
import tempfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import launch
import pytest
import torch
from models.tiny import tiny_model
from rollout import engine_program
from safetensors.torch import save_file

from megatron_rl.batch import Response

Seen = list[dict[str, dict[str, Any]]]  # [rank][folder's name]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Seen]:
    """start(nproc, families, *flags) -> what each rank saw with each family's tiny model."""
    models = tmp_path_factory.mktemp("models")

    def run(nproc: int, families: list[str], *flags: object) -> Seen:
        folders = [models / family for family in families]
        for folder in folders:
            if not folder.exists():
                tiny_model(folder, folder.name)
        out = tmp_path_factory.mktemp("out")
        launch.check(launch.torchrun(nproc, "tests/rollout/engine_program.py", out, *folders, *flags, timeout=400))
        ranks = [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(nproc)]
        return [{Path(folder).name: seen | {"folder": folder} for folder, seen in rank.items()} for rank in ranks]

    return run


@pytest.fixture(scope="module")
def single(start: Callable[..., Seen]) -> dict[str, dict[str, Any]]:
    dense = start(1, ["llama", "llama3", "qwen2", "qwen3"], "--faults")[0]
    # vLLM makes its process groups once, and those for experts only if the first model has some
    return dense | start(1, ["mixtral", "qwen3_moe"], "--faults")[0]


def check_weights(seen: Seen) -> None:
    """vLLM's parameters equal, bitwise, what vLLM itself loads from the HF tensors, after each of three syncs."""
    for rank in seen:
        for name, of_model in rank.items():
            assert of_model["differ"] == [], name
            assert [r.version for r in of_model["reports"]] == [1, 2, 3]


@torch.no_grad()
def check_logprobs(
    of_model: dict[str, Any], prompts: tuple = engine_program.PROMPTS * 2, trained: torch.dtype = torch.float32
) -> None:
    """The engine's log-probabilities equal those of transformers on the weights of the same step."""
    import transformers

    for step, responses in enumerate(of_model["drawn"]):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(f"{of_model['folder']}/config.json", folder)
            tensors = engine_program.values(of_model["folder"], step)
            tensors = {name: tensor.to(trained) for name, tensor in tensors.items()}
            save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for prompt, response in zip(prompts, responses, strict=True):
            ids = torch.tensor(prompt + response.token_ids)
            logprobs = model(ids[None]).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
            expected = logprobs.gather(1, ids[len(prompt) :, None])[:, 0]
            assert torch.allclose(torch.tensor(response.logprobs), expected, atol=1e-4), (of_model["folder"], step)
            assert response.weight_version == step + 1


def texts(responses: list[Response]) -> list[tuple[int, ...]]:
    return [response.token_ids for response in responses]


def test_weights_of_one_process(single: dict[str, dict[str, Any]]) -> None:
    """One process: bitwise vLLM's own loading, for every family, tied and untied, with bias and experts."""
    check_weights([single])


def test_logprobs_follow_every_sync(single: dict[str, dict[str, Any]]) -> None:
    """Log-probabilities equal transformers' to 1e-4 after every sync: no stale weights, no stale prefix cache."""
    for of_model in single.values():
        check_logprobs(of_model)


def test_nothing_received_where_layouts_agree(single: dict[str, dict[str, Any]]) -> None:
    """At TP 1 nothing is received, and only QKV (and experts) are stored twice."""
    for name, of_model in single.items():
        report = of_model["reports"][0]
        assert report.bytes_received == 0
        assert report.bytes_stored_twice == report.bytes_permuted
        assert report.bytes_permuted > 0
        assert report.bytes_permuted < report.bytes_aliased or name in ("mixtral", "qwen3_moe")  # experts are copied


def test_trainer_randomness_is_untouched(single: dict[str, dict[str, Any]]) -> None:
    """Starting the engine and generating leave torch's generator where it was."""
    for of_model in single.values():
        assert of_model["rng_kept_by_start"] and of_model["rng_kept"]


def test_seeds_decide(single: dict[str, dict[str, Any]]) -> None:
    """The same seeds repeat a rollout, other seeds give another; samples of one prompt differ."""
    for of_model in single.values():
        last = of_model["drawn"][-1]
        assert texts(last) == texts(of_model["again"]) != texts(of_model["other_seed"])
        assert len(set(texts(last))) == len(last)


def test_refuses_weights_that_are_not_the_trainers(single: dict[str, dict[str, Any]]) -> None:
    """Before the first sync, asleep, after a failed sync, or with wrong weights generate raises and says why."""
    for of_model in single.values():
        faults = of_model["faults"]
        assert "no weights yet" in of_model["refused_before_sync"]
        assert "older than the trainer's" in of_model["refused_asleep"]
        assert "older than the trainer's" in of_model["refused_wake"]
        assert "moved to other memory" in faults["moved_alias"]
        assert "failed or is not finished" in faults["refused_after_failure"]
        assert faults["after_move"] == 1  # a tensor that is only read may move
        assert "differ from the trainer's" in faults["corrupt"] and "q_proj.weight[0:" in faults["corrupt"]
        assert "differ from the trainer's" in faults["refused_corrupt"]


def test_an_engine_keeps_its_weights_when_others_are_built(single: dict[str, dict[str, Any]]) -> None:
    """The first of several engines in a process follows its own trainer on: weights bitwise, the same tokens."""
    firsts = [of_model for of_model in single.values() if "drawn_again" in of_model]
    assert len(firsts) == 2
    for of_model in firsts:
        assert of_model["differ_again"] == []
        assert texts(of_model["drawn_again"]) == texts(of_model["drawn"][1])


def test_bad_requests_are_named(single: dict[str, dict[str, Any]]) -> None:
    """Prompts that vLLM would stop at midway, and unknown engine arguments, give one line with numbers and flag."""
    for of_model in single.values():
        faults = of_model["faults"]
        assert faults["empty"] == "prompt 0 is empty"
        assert "127 tokens" in faults["long"] and "--max-response-length" in faults["long"]
        assert "vocabulary of 131" in faults["foreign"]
        assert "tokenizer" in faults["stop"]
        assert "enforce_eagre" in of_model["bad_vllm_args"] and "nearest: enforce_eager" in of_model["bad_vllm_args"]
        assert "--vllm-args quantization is decided by training" in of_model["quantized"]
        assert "an engine of torch.float16 cannot share the memory of training's" in of_model["other_dtype"]


def test_prompts_beyond_one_step(single: dict[str, dict[str, Any]]) -> None:
    """More prompt tokens than vLLM takes at once: no prompt is cut, at which vLLM's CPU sampler would fail."""
    for name, of_model in single.items():
        assert len(of_model["faults"]["many"]) == 40 and all(of_model["faults"]["many"]), name


def test_stop_tokens_end_a_response(single: dict[str, dict[str, Any]]) -> None:
    """A stop token is the response's last token, and the response is not truncated then."""
    for of_model in single.values():
        greedy, stopped = of_model["faults"]["greedy"], of_model["faults"]["stopped"]
        assert greedy.truncated and not stopped.truncated
        first = greedy.token_ids.index(stopped.token_ids[-1])
        assert stopped.token_ids == greedy.token_ids[: first + 1] and first <= 2


def check_replicas(seen: Seen) -> None:
    """Ranks of a replica generate the same; replicas draw different samples; one may have nothing to do."""
    for name in seen[0]:
        ranks = [rank[name] for rank in seen]
        for replica in ranks[0]["replicas"]:
            assert len({str([texts(d) for d in ranks[r]["drawn"]]) for r in replica}) == 1
        firsts = [ranks[replica[0]]["drawn"] for replica in ranks[0]["replicas"]]
        assert len(set(chain(*(texts(drawn[0]) for drawn in firsts)))) == 4 * len(firsts)
        assert [ranks[replica[0]]["uneven"] for replica in ranks[0]["replicas"]] == [1] * (len(firsts) - 1) + [0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "nproc, flags",
    [
        (2, ["--tp", 2]),
        (2, ["--rollout-tp", 2, "--copy"]),
        (4, ["--tp", 2, "--pp", 2, "--rollout-tp", 2, "--bucket-bytes", 5000]),
        (4, ["--tp", 2, "--pp", 2, "--rollout-tp", 4]),  # more ranks than KV heads
        (4, ["--tp", 2, "--pp", 2, "--rollout-tp", 4, "--place"]),  # a replica of ranks 0, 2, 1, 3 in this order
    ],
)
def test_any_layout(start: Callable[..., Seen], nproc: int, flags: list) -> None:
    """Several processes, another layout in rollout than in training: weights bitwise, log-probabilities to 1e-4."""
    seen = start(nproc, ["qwen2", "llama"], *flags)
    check_weights(seen)
    check_logprobs(seen[0]["qwen2"])
    check_logprobs(seen[-1]["llama"])
    check_replicas(seen)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("trained, engine", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_engine_of_another_dtype(start: Callable[..., Seen], trained: str, engine: str) -> None:
    """TP 2 -> TP 1 with --rollout-weights copy: weights are those that vLLM's loader makes of the trainer's, bitwise;
    what travels is the smaller of the two types; log-probabilities of a float32 engine are transformers'."""
    seen = start(2, ["qwen2"], "--tp", 2, "--copy", "--dtype", trained, "--engine-dtype", engine)
    check_weights(seen)
    if engine == "float32":
        check_logprobs(seen[0]["qwen2"], trained=torch.bfloat16)
    for rank in seen:
        report = rank["qwen2"]["reports"][0]
        assert report.bytes_aliased == 0
        permuted = report.bytes_permuted / getattr(torch, engine).itemsize
        assert 0.5 < report.bytes_received / 2 / permuted < 2, "about half of the model, in two bytes an element"


@pytest.mark.slow
def test_placement_lowers_the_traffic(start: Callable[..., Seen]) -> None:
    """TP 4 -> TP 2 with replicas of ranks that overlap: each receives half of its weights, what it lacks."""
    placed = start(4, ["llama"], "--tp", 4, "--rollout-tp", 2, "--place")
    check_weights(placed)
    check_logprobs(placed[0]["llama"])
    check_replicas(placed)
    assert placed[0]["llama"]["replicas"] == [[0, 2], [1, 3]]
    for rank in placed:
        report = rank["llama"]["reports"][0]
        total = report.bytes_received + report.bytes_permuted + report.bytes_aliased
        assert report.bytes_received <= 0.55 * total  # the vocabulary's padding is not spread evenly
    first = placed[0]["llama"]["reports"][0]
    assert first.bytes_received == first.bytes_permuted
