"""Rollout by transformers' generate: answers as the vLLM engine does, and trains."""

import json
import tempfile
from pathlib import Path
from typing import Any

import launch
import pytest
import torch
from models.tiny import tiny_model, tiny_tokenizer
from rollout.engine_program import values
from rollout.hf_program import DRAWN, REQUESTS
from safetensors.torch import save_file

from megatron_rl.batch import Response


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What both engines answered, by the model's folder."""
    folder = tmp_path_factory.mktemp("hf")
    models = [tiny_tokenizer(tiny_model(folder / family, family)) for family in ("llama3", "qwen2")]
    launch.check(launch.torchrun(1, "tests/rollout/hf_program.py", folder / "seen.pt", *models, timeout=280))
    return torch.load(folder / "seen.pt", weights_only=False)


def test_answers_as_vllm(seen: dict[str, dict[str, Any]]):
    """Greedy tokens, ends and truncation are vLLM's in float32, log-probabilities to 1e-4, for every way of ending."""
    for of_model in seen.values():
        for name, (vllm, hf) in of_model["asked"].items():
            for a, b in zip(vllm, hf, strict=True):
                assert (a.token_ids, a.truncated, a.weight_version) == (b.token_ids, b.truncated, 1), name
                assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4), name
        lengths = {name: len(hf[0].token_ids) for name, (_, hf) in of_model["asked"].items()}
        assert lengths["stop text"] <= 6 < lengths["stop text, min"] and lengths["stop token"] <= 3
        assert lengths["stop token, min"] >= 5 and lengths["no eos"] == 16


@torch.no_grad()
def expected_logprobs(folder: str, responses: list[Response]) -> list[torch.Tensor]:
    """By one unpadded pass of transformers on each sequence, after temperature."""
    import transformers

    with tempfile.TemporaryDirectory() as copy:
        (Path(copy) / "config.json").write_text((Path(folder) / "config.json").read_text())
        save_file(values(folder, 1), f"{copy}/model.safetensors", metadata={"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32).eval()
    found = []
    for request, response in zip(REQUESTS, responses, strict=True):
        ids, start = torch.tensor(request.token_ids + response.token_ids), len(request.token_ids)
        logprobs = (model(ids[None]).logits[0] / DRAWN.temperature).log_softmax(-1)[start - 1 : -1]
        found.append(logprobs.gather(1, ids[start:, None])[:, 0])
    return found


def test_draws_by_seed_after_temperature(seen: dict[str, dict[str, Any]]):
    """Log-probabilities are those after temperature; a sample depends on its own seed, not on its batch."""
    for folder, of_model in seen.items():
        drawn = of_model["drawn"]
        for response, expected in zip(drawn, expected_logprobs(folder, drawn), strict=True):
            assert torch.allclose(torch.tensor(response.logprobs), expected, atol=1e-4)
        assert of_model["again"][0].token_ids == drawn[1].token_ids
        greedy = [r.token_ids[:12] for r in of_model["asked"]["greedy"][1]]
        assert [r.token_ids for r in drawn] != greedy
        for cut in ("top_k", "top_p"):  # one token is left: it is certain
            assert [r.token_ids for r in of_model[cut]] == greedy
            assert all(value == 0 for r in of_model[cut] for value in r.logprobs)
        assert of_model["nothing"] == []


def test_refuses_weights_that_are_not_the_trainers(seen: dict[str, dict[str, Any]]):
    """Before the first sync, asleep, and with a wrong element it refuses, in the words of the vLLM engine."""
    for of_model in seen.values():
        assert of_model["Engine"] == of_model["HFEngine"] and "no weights yet" in of_model["HFEngine"]
        assert all("older than the trainer's" in message for message in of_model["asleep"])
        assert "model.norm.weight[0:1" in of_model["corrupt"]


def test_trains_with_any_training_layout(tmp_path: Path):
    """train_ppo.py on TP 2: each rank gets every weight, both sides agree to 1e-4, and nothing is on stderr."""
    tiny_tokenizer(tiny_model(tmp_path / "model", "llama"))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {i} "}) + "\n" for i in range(8)))
    text = f"""--hf-model {tmp_path}/model --train-data {tmp_path}/prompts.jsonl --output-dir {tmp_path}/out --no-bf16
        --train-iters 2 --rollout-backend hf --rollout-batch-size 4 --n-samples-per-prompt 2 --reward length --lr 1e-3
        --advantage-estimator rloo --no-apply-chat-template --max-prompt-length 16 --verify-weights every
        --tensor-model-parallel-size 2 --rollout-tensor-parallel-size 1 --max-response-length 12 --stop ab
        --no-save-hf --show-samples 1"""
    result = launch.torchrun(2, "train_ppo.py", *text.split(), timeout=280)
    assert "2 transformers models" in launch.check(result) and result.stderr == ""
    rows = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["correction/logprob_diff_max"] < 1e-4 and row["sync/bytes_received"] > 0
    assert rows[1]["policy/grad_norm"] > 0
