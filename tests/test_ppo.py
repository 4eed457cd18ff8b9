"""train_ppo.py whole, on tiny models: what it writes and says, seeds, layouts of training and rollout, and endings."""

import json
import re
import time
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import launch
import pytest
import torch
from models.tiny import tiny_model, tiny_tokenizer

from megatron_rl.metrics import METRICS, RULE_PREFIX

TIMES = ("seconds", "per_second", "memory/")  # metrics that no two runs have alike
STEPS = 3
FIXED = """--no-bf16 --no-apply-chat-template --max-prompt-length 16 --max-response-length 12 --rollout-batch-size 4
    --n-samples-per-prompt 2 --global-batch-size 4 --update-epochs 2 --lr 1e-3 --kv-cache-gb 0.02
    --vllm-args enforce_eager=true"""
PPO = """--reward length --kl-coef 0.05 --kl-target 0.1 --kl-horizon 100 --critic-warmup-iters 1 --critic-lr 2e-3
    --entropy-coef 0.01 --verify-weights every --show-samples 1"""
GRPO = """--reward length --advantage-estimator grpo --kl-coef 0.05 --kl-in loss --kl-estimator k3
    --n-samples-per-prompt 4 --verify-weights every --micro-batch-size 3"""


@dataclass(frozen=True)
class Task:
    """A folder with a tiny model and prompts, of which one is too long."""

    folder: Path

    def argv(self, name: str, text: str, *more: object) -> list[str]:
        paths = [f"--{k}={self.folder / v}" for k, v in (("hf-model", "model"), ("output-dir", name))]
        paths += [f"--train-data={self.folder}/prompts.jsonl", f"--train-iters={STEPS}"]
        return [*paths, *FIXED.split(), *text.split(), *map(str, more)]

    def rows(self, name: str) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()]

    def values(self, name: str) -> list[dict[str, float]]:
        """The rows without times."""
        return [{k: v for k, v in row.items() if not any(t in k for t in TIMES)} for row in self.rows(name)]

    def samples(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name / "samples.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    folder = tmp_path_factory.mktemp("task")
    tiny_tokenizer(tiny_model(folder / "model", "llama3"))
    tiny_tokenizer(tiny_model(folder / "scorer", "qwen2", head="SequenceClassification", seed=1))
    rows = [{"prompt": f"say {i} ", "kind": "odd" if i % 2 else "even"} for i in range(10)] + [{"prompt": "x" * 17}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Task(folder)


def several(task: Task, processes: int, runs: list[list[str]], timeout: float = 280) -> str:
    plan = task.folder / "runs.json"
    plan.write_text(json.dumps(runs))
    program = "tests/ppo_runs_program.py"
    return launch.check(launch.torchrun(processes, program, plan, timeout=timeout))


@pytest.fixture(scope="module")
def ppo(task: Task) -> launch.Result:
    """One process with everything that PPO has."""
    result = launch.torchrun(1, "train_ppo.py", *task.argv("ppo", PPO), timeout=280)
    launch.check(result)
    return result


def test_every_stage_says_a_line(ppo: launch.Result, task: Task):
    """A header, and of each step one line a stage, in order; the prompt that is too long is counted."""
    lines = ppo.stdout.splitlines()
    assert "10 prompts of 6 to 6 tokens from 1 file(s), 1 longer than 16 tokens (--max-prompt-length) left out" in (
        ppo.stdout
    )
    for name in ("policy", "critic", "reference"):
        assert any(line.startswith(f"{name:<10}{task.folder}") for line in lines), name
    stages = [line.split()[0] for line in lines if line.startswith("[")]
    first = ["[rollout]", "[reward]", "[logprobs]", "[advantage]", "[critic]", "[step]"]
    later = ["[sync]", *first[:-1], "[policy]", "[step]"]
    assert stages == ["[sync]", "[before]", *first, *later, *later, "[sync]", "[after]"]
    assert "wrote" in lines[-1] and "actor and critic" in lines[-1]


def test_libraries_are_quiet(ppo: launch.Result):
    """Nothing is on the console but the program's own lines: no warnings, bars or logs of megatron-core or vLLM."""
    assert ppo.stderr == ""
    own = ("[", "model ", "training ", "a rank ", "rollout ", "a step ", "policy ", "critic ", "reference ", "memory ")
    own += ("data ", "output ", "estimate ", "warning: ", "wrote ")
    estimate = re.compile(r" {10}(policy|critic|reference|rollout)( update| forward|:)? .*\d GB.*")
    foreign = [line for line in ppo.stdout.splitlines() if not (line.startswith(own) or estimate.fullmatch(line))]
    assert not foreign, foreign


def test_metrics_are_documented_and_whole(ppo: launch.Result, task: Task):
    """metrics.jsonl holds every metric of METRICS that this run can have, numbers all, and TensorBoard the same."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = task.rows("ppo")
    assert [row["step"] for row in rows] == [1, 2, 3]
    names = {name for name in METRICS if not name.startswith(("dpo/", "eval/"))}
    absent = {"policy/dual_clip_fraction", "policy/kl", "reward/overlong_penalty"}  # of flags that this run has not
    absent |= {name for name in names if name.startswith(("sampling/", "policy/engine_"))}
    assert rows[2].keys() - {"step"} == names - absent | {RULE_PREFIX + "length"}
    assert all(isinstance(value, int | float) and value == value for row in rows for value in row.values())
    events = EventAccumulator(str(task.folder / "ppo/tensorboard"))
    events.Reload()
    for name in rows[2].keys() - {"step"}:
        written = [row[name] for row in rows if name in row]
        assert [event.value for event in events.Scalars(name)] == pytest.approx(written, rel=1e-6), name
    assert all(unit and len(meaning) > 5 for unit, meaning in METRICS.values())
    assert len(task.samples("ppo")) == 2 * STEPS


def test_ppo_does_what_its_flags_say(ppo: launch.Result, task: Task):
    """Critic warm-up leaves the policy at the reference; then two epochs of two minibatches move it; KL adapts."""
    one, two, three = task.rows("ppo")
    assert "policy/loss" not in one and one["kl/token"] == two["kl/token"] == 0 and three["kl/token"] != 0
    assert ppo.stdout.count("4 optimizer steps") == 3 + 2
    assert three["policy/learning_rate"] == pytest.approx(1e-3) and one["critic/learning_rate"] == pytest.approx(2e-3)
    assert one["kl/coef"] != 0.05 and one["kl/coef"] != two["kl/coef"]
    for row in (one, two, three):
        assert row["rollout/samples"] == 8 and row["correction/logprob_diff_max"] < 1e-4
        assert row["sync/bytes_received"] == 0
    assert two["policy/ratio"] != 1 and two["policy/entropy"] > 1


def test_exports_load_in_transformers(ppo: launch.Result, task: Task):
    """actor/ gives in transformers the greedy text that the engine said after the last step; critic/ has its head."""
    import transformers

    actor = task.folder / "ppo/actor"
    model = transformers.AutoModelForCausalLM.from_pretrained(actor, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(actor)
    ids = tokenizer("say 0 ", return_tensors="pt")["input_ids"]
    greedy = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    text = tokenizer.decode(greedy[0, ids.shape[1] :], skip_special_tokens=True)
    assert f"[after] {'say 0 '!r} -> {text!r}" in ppo.stdout
    critic = transformers.AutoModelForSequenceClassification.from_pretrained(task.folder / "ppo/critic")
    start = transformers.AutoModelForCausalLM.from_pretrained(task.folder / "model", dtype=torch.float32)
    assert critic.score.weight.shape == (1, 128) and float(critic.score.weight.detach().abs().max()) > 0
    for name, model_now in (("actor", model), ("critic", critic)):
        moved = (model_now.model.layers[1].mlp.up_proj.weight - start.model.layers[1].mlp.up_proj.weight).detach()
        assert 0 < float(moved.abs().max()) < 0.05, name


@pytest.fixture(scope="module")
def again(ppo: launch.Result, task: Task) -> str:
    """The run of `ppo` again, with everything offloaded and with evaluations; one with another seed; and one with stop
    texts and a temperature."""
    held_out = [{"prompt": f"ask {i} ", "data_source": "ab"[i % 2], "label": i} for i in range(4)]
    (task.folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    evaluation = ["--eval-data", task.folder / "eval.jsonl", "--eval-interval", 2, "--eval-pass-reward", 0.05]
    evaluation += ["--eval-samples-per-prompt", 3]
    offload = [f"--offload-{part}" for part in ("optimizer", "gradients", "reference", "critic")]
    short = ("--no-save-hf", "--show-samples", 0)
    other = task.argv("other", PPO, *short, "--seed", 5, "--train-iters", 1)
    ends = ["--temperature", 0.6, "--stop", *"abcdefgh", "--log-samples", 99, "--train-iters", 1]
    stops = task.argv("stops", "--reward length --advantage-estimator grpo", "--no-save-hf", *ends)
    return several(task, 1, [task.argv("again", PPO, *short, *offload, *evaluation), other, stops])


def test_evaluation_is_what_its_samples_say(again: str, task: Task):
    """Before the first step, every second and after the last: mean reward and pass@k, over all and by data_source, are
    those of the samples in the file, by counting subsets; each file has a sample of every prompt and number."""
    rows = {row["step"]: row for row in task.rows("again") if "eval/reward" in row}
    assert list(rows) == [0, 2, 3] and again.count("[eval]") == 3
    for step, row in rows.items():
        lines = (task.folder / f"again/eval/step_{step}.jsonl").read_text().splitlines()
        samples = [json.loads(line) for line in lines]
        assert [sample["row"] for sample in samples] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
        assert all(s["label"] == s["row"] - 1 and s["prompt"] == f"ask {s['label']} " for s in samples)
        for ending, source in (("", "ab"), ("/a", "a"), ("/b", "b")):
            taken = [sample for sample in samples if sample["data_source"] in source]
            assert all(s["passed"] == (s["reward"] >= 0.05) and s["rewards"]["length"] == s["reward"] for s in taken)
            reward = sum(sample["reward"] for sample in taken) / len(taken)
            assert row[f"eval/reward{ending}"] == pytest.approx(reward)
            for k in (1, 2, 3):
                draws = [c for i in range(0, len(taken), 3) for c in combinations(taken[i : i + 3], k)]
                share = sum(any(s["passed"] for s in draw) for draw in draws) / len(draws)
                assert row[f"eval/pass@{k}{ending}"] == pytest.approx(share)
        assert row["eval/length_mean"] == sum(s["tokens"] for s in samples) / 12


def test_evaluation_and_offloading_do_not_disturb(again: str, task: Task):
    """The same flags give the same metrics and samples, digit for digit, also with evaluations and everything
    offloaded."""
    values = [{k: v for k, v in row.items() if "eval/" not in k} for row in task.values("again") if row["step"]]
    assert values == task.values("ppo") and task.samples("again") == task.samples("ppo")


def test_seeds_decide(again: str, task: Task):
    """Another seed gives other metrics and samples."""
    assert task.values("other")[0] != task.values("ppo")[0]
    texts = {name: {row["response"] for row in task.samples(name)} for name in ("ppo", "other")}
    assert texts["ppo"].isdisjoint(texts["other"])


def test_stop_texts_end_a_response_and_temperature_counts(again: str, task: Task):
    """A response ends with the first stop text, which stays in it, with EOS or at the limit, which is flagged; trainer
    and engine agree on probabilities at temperature 0.6."""
    ends = set()
    for sample in task.samples("stops"):
        text, at_limit = sample["response"], sample["tokens"] == 12
        assert not set(text[:-1]) & set("abcdefgh") and (at_limit or not sample["truncated"])
        ends.add("limit" if sample["truncated"] else "stop" if text and text[-1] in "abcdefgh" else "eos")
    assert {"limit", "stop"} <= ends
    assert task.rows("stops")[0]["correction/logprob_diff_max"] < 1e-4


ROUTED = """
- {name: scorer, path: FOLDER/scorer, weight: 0.5, condition: "kind == 'odd'"}
- {name: short, rule: length, condition: "kind == 'odd'"}
- {name: rest, rule: "length:100"}
"""
DATASET = """
class Words:
    def __init__(self, files): self.files = files
    def __len__(self): return 1
    def __getitem__(self, index): return {"prompt": f"one of {len(self.files)} "}
"""


@pytest.fixture(scope="module")
def two_ranks(task: Task) -> str:
    """GRPO by routed rules and a reward model on two data-parallel ranks, then on two tensor-parallel ones; and one
    prompt of a custom data set by the reward model alone."""
    (task.folder / "routed.yaml").write_text(ROUTED.replace("FOLDER", str(task.folder)))
    (task.folder / "words.py").write_text(DATASET)
    routed = GRPO.replace("--reward length", f"--reward-config {task.folder}/routed.yaml --no-drop-last")
    routed += f" --eval-data {task.folder}/prompts.jsonl --eval-interval 99"
    alone = GRPO.replace("--reward length", f"--reward-model {task.folder}/scorer")
    alone += f" --dataset-class {task.folder}/words.py:Words --min-response-length 3 --rollout-batch-size 1"
    one_prompt = task.argv("replicas", alone, "--log-samples", 99, "--train-iters", 1)
    tp = task.argv("tp", routed, "--tensor-model-parallel-size", 2, "--rollout-tensor-parallel-size", 1)
    return several(task, 2, [task.argv("dp", routed), one_prompt, tp])


def test_layouts_of_two_ranks(two_ranks: str, task: Task):
    """DP 2, and TP 2 with two engines of TP 1, give the same samples and the same numbers to float32 rounding."""
    dp, tp = task.values("dp"), task.values("tp")
    for first, second in zip(dp, tp, strict=True):
        layouts = {name for name in first if name.startswith("sync/")}
        for name in first.keys() - layouts:
            assert first[name] == pytest.approx(second[name], rel=2e-3, abs=2e-4), name
    for first, second in zip(task.samples("dp"), task.samples("tp"), strict=True):
        assert first == second | {"reward": pytest.approx(second["reward"], abs=1e-4)}
    assert dp[1]["sync/bytes_received"] == 0 < tp[1]["sync/bytes_received"]
    assert {"policy/kl", "reward/equal_groups"} <= dp[1].keys() and "critic/loss" not in dp[1]
    assert [row["rollout/samples"] for row in dp[1:]] == [16, 16, 8]  # the last two prompts of the epoch are kept


def test_rewards_go_where_the_config_says(two_ranks: str, task: Task):
    """Rows that the condition holds for get the weighted sum of rule and reward model, the others the default rule."""
    lines = (task.folder / "dp/eval/step_0.jsonl").read_text().splitlines()
    for sample in map(json.loads, lines):
        given = sample["rewards"]
        odd = int(sample["prompt"].split()[1]) % 2
        assert given.keys() == ({"scorer", "short"} if odd else {"rest"})
        assert sample["reward"] == pytest.approx(0.5 * given["scorer"] + given["short"] if odd else given["rest"])
    assert len(lines) == 10


def test_replicas_draw_different_samples(two_ranks: str, task: Task):
    """One prompt of a custom data set on two engines: four different samples, none shorter than the least length."""
    samples = task.samples("replicas")
    assert len({sample["response"] for sample in samples}) == len(samples) == 4
    assert all(sample["prompt"] == "one of 1 " and sample["tokens"] >= 3 for sample in samples)


DAPO = """--advantage-estimator grpo --dynamic-sampling --max-sampling-rounds 3 --overlong-buffer 8
    --overlong-penalty 0.5 --clip-high 0.28 --rollout-batch-size 3 --global-batch-size 6 --no-save-hf
    --log-samples 99 --reward"""
HALF = """
def half(prompt, response, row): return len(response) / 10 if int(prompt.split()[1]) % 2 else 0.5
def same(prompt, response, row): return 0.5
"""


@pytest.fixture(scope="module")
def dapo(task: Task) -> launch.Result:
    """DAPO with a rule that tells apart the samples of half of the prompts, again from the checkpoint of step 1, and
    with one that tells none apart."""
    (task.folder / "half.py").write_text(HALF)
    half = f"{DAPO} {task.folder}/half.py:half"
    runs = [task.argv("dapo", half, "--save", task.folder / "saved", "--save-interval", 1)]
    runs += [task.argv("resumed", half, "--load", task.folder / "saved/iter_0000001")]
    runs += [task.argv("nothing", f"{DAPO} {task.folder}/half.py:same")]
    (task.folder / "dapo.json").write_text(json.dumps(runs))
    return launch.torchrun(1, "tests/ppo_runs_program.py", task.folder / "dapo.json", timeout=280)


def test_dynamic_sampling_refills_the_batch(dapo: launch.Result, task: Task):
    """Groups of equal rewards are dropped, further prompts asked until the batch is full or the rounds are over; each
    sample has its own seed; rewards are reported of all that was drawn, with the overlong penalty apart."""
    for row in task.rows("dapo"):
        drawn = [sample for sample in task.samples("dapo") if sample["step"] == row["step"]]
        pairs = list(zip(drawn[::2], drawn[1::2], strict=True))
        assert all(one["prompt"] == other["prompt"] for one, other in pairs)
        kept = [abs(one["reward"] - other["reward"]) > 1e-6 for one, other in pairs]
        assert (row["sampling/kept_groups"], row["sampling/dropped_groups"]) == (sum(kept), len(kept) - sum(kept))
        assert sum(kept) == 3 or row["sampling/rounds"] == 3
        assert row["rollout/samples"] == len(drawn)
        assert row["reward/equal_groups"] == pytest.approx(kept.count(False) / len(kept))
        over = [min(max(sample["tokens"] - 4, 0) / 8, 1) for sample in drawn]
        assert row["reward/overlong_penalty"] == pytest.approx(-0.5 * sum(over) / len(over))
        assert row["reward/mean"] == pytest.approx(sum(sample["reward"] for sample in drawn) / len(drawn))
        asked_twice = [s for s in drawn if sum(s["prompt"] == other["prompt"] for other in drawn) > 2]
        assert len({s["response"] for s in asked_twice}) == len(asked_twice)
    assert sum(row["sampling/dropped_groups"] for row in task.rows("dapo")) > 0


def test_dynamic_sampling_resumes_exactly(dapo: launch.Result, task: Task):
    """The data position counts the prompts that were dropped: a resumed run draws what the unbroken one drew."""
    assert task.values("resumed") == task.values("dapo")[1:]
    assert task.samples("resumed") == [sample for sample in task.samples("dapo") if sample["step"] > 1]


def test_nothing_to_learn_from_is_an_error(dapo: launch.Result, task: Task):
    """Where every group of every round has equal rewards the run stops with one line of numbers and flags."""
    assert dapo.returncode != 0
    (line,) = [line for line in dapo.stderr.splitlines() if line.startswith("error: ")]
    assert "each of the 9 groups of 3 rounds (--max-sampling-rounds)" in line and "--n-samples-per-prompt 2" in line
    assert "warning: all rewards of this step are equal" in dapo.stdout


@pytest.mark.slow
@pytest.mark.parametrize("rollout_tp", [1, 2, 4])
def test_layouts_of_four_ranks(task: Task, rollout_tp: int):
    """TP2 PP2 with engines of TP 1, 2 and 4: after every sync the engine holds the trainer's bytes; both agree."""
    layout = ["--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2]
    name = f"four_{rollout_tp}"
    argv = task.argv(name, PPO, *layout, "--rollout-tensor-parallel-size", rollout_tp)
    launch.check(launch.torchrun(4, "train_ppo.py", *argv, timeout=290))
    assert all(row["correction/logprob_diff_max"] < 1e-4 for row in task.rows(name))
    assert (task.folder / name / "actor/config.json").exists() and (task.folder / name / "critic").exists()


# --- endings --------------------------------------------------------------------------------------------------------

RULE = """
import os, time
calls = 0
def rule(prompt, response, row):
    global calls
    calls += 1
    if calls > 4 and os.environ["RANK"] == "1":  # each of two ranks scores 4 of 8 samples a step
        open({when!r}, "w").write(str(time.time()))
        {act}
    return 1.0
"""


def end_of(task: Task, folder: Path, act: str) -> tuple[launch.Result, float]:
    """Two ranks whose rule does `act` on rank 1 in step 2: the result, and the seconds until all were gone."""
    when = folder / "when"
    (folder / "rule.py").write_text(RULE.format(when=str(when), act=act))
    workers = 1 if "raise" in act else 0  # what is killed is the rank
    flags = f"--reward {folder}/rule.py:rule --reward-workers {workers} --advantage-estimator rloo --no-save-hf"
    result = launch.torchrun(2, "train_ppo.py", *task.argv("endings", flags), timeout=280)
    assert result.returncode != 0
    return result, time.time() - float(when.read_text())


@pytest.mark.parametrize(
    "act", ["raise KeyError('no such word')", pytest.param("os.kill(os.getpid(), 9)", marks=pytest.mark.slow)]
)
def test_one_rank_fails(task: Task, tmp_path: Path, act: str):
    """A rule raises, or a process is killed, on rank 1 in step 2: all are gone within 30 s, one error is shown."""
    result, seconds = end_of(task, tmp_path, act)
    assert seconds < 30
    assert "[step] 1" in result.stdout and "[step] 2" not in result.stdout
    if "raise" in act:
        assert result.stderr.count("no such word") == 1 and "Connection closed" not in result.stderr, result.stderr
        (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert "row with index" in line and "rule rule" in line
    else:
        assert "error: " not in result.stderr and "-9" in result.stderr


def test_bad_input_under_torchrun(task: Task):
    """Two ranks that meet the same bad input say it once, and leave nothing behind."""
    argv = task.argv("absent", PPO, "--vllm-args", "enforce_eagr=true")
    result = launch.torchrun(2, "train_ppo.py", *argv)
    assert result.returncode != 0
    lines = [line for line in result.stderr.splitlines() if "enforce_eagr" in line]
    assert lines == ["error: --vllm-args enforce_eagr is no argument of vLLM; nearest: enforce_eager"], result.stderr
    assert not (task.folder / "absent").exists()
