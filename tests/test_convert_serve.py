"""What a run exports: vLLM's server answers with it as the engine in the run did, transformers loads it."""

import ast
import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import launch
import pytest
import torch
from models.tiny import tiny_model, tiny_tokenizer


def ask(port: int, path: str, body: dict | None = None) -> dict | None:
    """The server's answer; None while it does not answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or "{}")
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from error
    except urllib.error.URLError:
        return None


def serve_and_ask(folder: Path, prompts: list[str], log: Path) -> list[dict]:
    """Greedy answers of 12 tokens, and their ids, from vLLM's OpenAI server on the loopback address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    flags = f"--host 127.0.0.1 --port {port} --enforce-eager --max-model-len 64 --dtype float32".split()
    environment = launch.environment({"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    with open(log, "w") as file:
        process = subprocess.Popen([*server, *flags], stdout=file, stderr=file, env=environment)
    try:
        begun = time.monotonic()
        while ask(port, "/v1/models") is None:
            assert process.poll() is None and time.monotonic() - begun < 400, log.read_text()[-3000:]
            time.sleep(1)
        body = {"model": str(folder), "temperature": 0, "max_tokens": 12, "return_token_ids": True}
        answers = [ask(port, "/v1/completions", body | {"prompt": prompt}) for prompt in prompts]
        return [answer["choices"][0] for answer in answers if answer]
    finally:
        launch.kill_tree(process)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_export_serves_and_loads(tmp_path):
    """Over HTTP come the texts and tokens that the run's own engine gave; transformers loads actor and critic."""
    import transformers

    model = tiny_tokenizer(tiny_model(tmp_path / "model", "qwen2"))
    prompts = ["say 0 ", "count: ", "why? "]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    flags = f"""--hf-model {model} --train-data {tmp_path}/p.jsonl --no-apply-chat-template --reward length
        --max-prompt-length 16 --max-response-length 12 --rollout-batch-size 3 --n-samples-per-prompt 2 --lr 1e-2
        --no-progress --output-dir {tmp_path}/out --vllm-args enforce_eager=true --train-iters 2 --show-samples 3
        --no-bf16"""
    out = launch.check(launch.torchrun(1, "tests/serve_program.py", *flags.split(), timeout=400))
    shown = re.findall(r"^\[after\] (.*) -> (.*)$", out, re.MULTILINE)
    expected = {ast.literal_eval(prompt): ast.literal_eval(text) for prompt, text in shown}
    assert expected.keys() == set(prompts) and out.count("[before]") == 3
    answers = serve_and_ask(tmp_path / "out" / "actor", prompts, tmp_path / "log")
    assert [answer["text"] for answer in answers] == [expected[prompt] for prompt in prompts]
    tokens = json.loads(re.search(r"^tokens (.*)$", out, re.MULTILINE)[1])
    assert [[answer["prompt_token_ids"], answer["token_ids"]] for answer in answers] == tokens
    assert len({str(response) for _, response in tokens}) > 1 and all(response for _, response in tokens)
    for head, folder in (("CausalLM", "actor"), ("SequenceClassification", "critic")):
        kind = getattr(transformers, f"AutoModelFor{head}")
        loaded, info = kind.from_pretrained(tmp_path / "out" / folder, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        assert all(torch.isfinite(param).all() for param in loaded.parameters())
    assert loaded.score.weight.shape == (1, 128) and loaded.score.weight.any()
