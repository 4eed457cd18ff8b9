import time

import pytest

from megatron_rl.rewards.router import (
    RewardEntry,
    RewardError,
    RuleRewards,
    ScoringInput,
    entries_from_config,
    entries_from_specs,
)

RULES = """
import os, sys, time
def good(prompt, response, row): return len(prompt) + 10 * len(response)
def none(prompt, response, row): return None
def nan(prompt, response, row): return float("nan")
def inf(prompt, response, row): return 1e400
def text(prompt, response, row): return "0.5"
def fails(prompt, response, row): return {}[response] if row["n"] == 2 else 1.0
def hangs(prompt, response, row):
    while row["n"] == 2: time.sleep(0.01)
    return 1.0
def dies(prompt, response, row): os._exit(3)
def slow(prompt, response, row): time.sleep(0.5); return row["n"]
def process(prompt, response, row): return os.getpid()
def modules(prompt, response, row): return sum(m.split(".")[0] in ("torch", "megatron", "vllm") for m in sys.modules)
def loud(prompt, response, row): print("to stdout", "x" * 100000); return 1
"""


@pytest.fixture
def rules(tmp_path):
    file = tmp_path / "rules_here.py"
    file.write_text(RULES)
    return lambda name: f"{file}:{name}"


def samples(n=4, **row):
    return [ScoringInput("p" * i, "r", {"n": i, "data_source": "news", **row}, 100 + i) for i in range(n)]


def rewards(*specs, workers=0, timeout=20.0):
    return RuleRewards(entries_from_specs(specs), workers, timeout)


@pytest.mark.parametrize("workers", [0, 2])
def test_weighted_sum_in_order(rules, workers):
    """Each reward is the weighted sum of its rules, in the order of the samples, in this process or in others."""
    scorer = rewards(rules("good") + "=2", "length:2=-0.5", workers=workers)
    assert scorer.score(samples()) == [2 * (10 + i) - 0.25 for i in range(4)]
    scores = scorer.score_by_name(samples())
    assert scores.means() == {"good": 11.5, "length": 0.5}
    scorer.close()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("none", "row with index 100 .*'news'.*rule none returned NoneType 'None', not a number"),
        ("text", "row with index 100 .*rule text returned str '0.5', not a number"),
        ("nan", "row with index 100 .*reward nan gave nan, not a finite number"),
        ("inf", "row with index 100 .*reward inf gave inf"),
        ("fails", "row with index 102 .*data_source 'news'.*rule fails raised KeyError: 'r'"),
    ],
)
def test_what_is_no_number_names_row_source_and_rule(rules, workers, rule, message):
    """None, text, NaN, infinity and an exception stop the run with row index, data source and rule."""
    scorer = rewards(rules(rule), workers=workers)
    with pytest.raises(RewardError, match=message):
        scorer.score(samples())
    scorer.close()


def test_a_hung_rule_is_killed_and_named(rules):
    """A rule that never returns is stopped at the timeout, named, and leaves no process; the next call works."""
    scorer = rewards(rules("hangs"), workers=2, timeout=2.0)
    start = time.monotonic()
    with pytest.raises(RewardError, match=r"index 102 .*rule hangs took longer than 2 s .*--reward-timeout"):
        scorer.score(samples())
    assert time.monotonic() - start < 30
    assert scorer._pool._workers == []
    assert scorer.score(samples(2)) == [1.0, 1.0]
    scorer.close()


def test_the_timeout_counts_a_sample_not_the_batch(rules):
    """14 samples of half a second on two workers take longer than the timeout of one, and pass side by side."""
    scorer = rewards(rules("slow"), workers=2, timeout=3.0)
    scorer.score(samples(2))
    start = time.monotonic()
    assert scorer.score(samples(14)) == list(range(14))
    assert 3.4 < time.monotonic() - start < 6.5
    scorer.close()


def test_a_rule_that_ends_its_process_is_named(rules):
    """A crash of the worker is the rule's fault, with its exit code, and no hang."""
    scorer = rewards(rules("dies"), workers=1)
    with pytest.raises(RewardError, match=r"index 100 .*rule dies ended its process \(exit code 3\)"):
        scorer.score(samples())


def test_workers_are_lazy_bare_and_kept(rules, capfd):
    """Workers start at the first call, import no torch, megatron or vllm, print freely, and serve later calls."""
    scorer = rewards(rules("process"), rules("modules") + "=0", rules("loud") + "=0", workers=1)
    assert scorer._pool._workers == []
    first, second = scorer.score_by_name(samples(2)), scorer.score_by_name(samples(2))
    assert first.by_name["process"] == second.by_name["process"]
    assert set(first.by_name["modules"].values()) == {0.0}
    assert "to stdout" in capfd.readouterr().out
    scorer.close()


def test_shipped_rules_run_in_workers():
    """math-verify (which uses signals), VADER and reasoning-gym work inside workers."""
    row = {"label": "4", "answer": "4", "metadata": {"source_dataset": "chain_sum"}}
    scorer = rewards("math_verify", "sentiment", "reasoning_gym", workers=1)
    assert scorer.score([ScoringInput("2 + 2", "4", row, 0)]) == [2.0]
    scorer.close()


CONFIG = """
- name: news
  path: {model}
  weight: 2
  condition: "data_source == 'news'"
- name: short
  rule: length:10
  condition: "data_source in ('news', 'chat')"
- rule: exact_match
"""


def config(tmp_path, text=CONFIG):
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    file = tmp_path / "rewards.yaml"
    file.write_text(text.replace("{model}", str(model)))
    return str(file)


def test_rows_go_where_conditions_say(tmp_path):
    """Every entry whose condition holds scores a row, the default scores the rest, models' scores are added."""
    scorer = RuleRewards(entries_from_config(config(tmp_path)))
    sources = ["news", "math", "chat", "news"]
    batch = [ScoringInput("", "hello", {"data_source": s, "label": "hello"}, i) for i, s in enumerate(sources)]
    assert scorer.models == {"news": str(tmp_path / "model")}
    assert scorer.model_places(batch) == {"news": [0, 3]}
    scores = scorer.score_by_name(batch, {"news": [0.25, -1.0]})
    assert scores.total == [2 * 0.25 + 0.5, 1.0, 0.5, 2 * -1.0 + 0.5]
    assert scores.means() == {"news": -0.375, "short": 0.5, "exact_match": 1.0}
    with pytest.raises(RewardError, match="index 0 .*reward news gave nan"):
        scorer.score(batch, {"news": [float("nan"), 0.0]})
    with pytest.raises(AssertionError, match="0 scores of reward model news for 2 samples"):
        scorer.score(batch)


def test_a_row_that_matches_nothing_is_an_error():
    """Without a default a row of another source, or without the key, is named with the conditions."""
    scorer = RuleRewards([RewardEntry("a", rule="length", condition="data_source == 'news'")])
    scorer.check_rows([(0, {"data_source": "news"})])
    with pytest.raises(RewardError, match="index 7 .*'math'.*no condition of --reward-config holds"):
        scorer.check_rows([(0, {"data_source": "news"}), (7, {"data_source": "math"})])
    with pytest.raises(RewardError, match="index 7: condition .* asks for the key 'data_source'"):
        scorer.check_rows([(7, {"prompt": "x"})])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rule: length", "must be a list of entries, found dict"),
        ("", "must be a list"),
        ("- {rule: length", "not YAML"),
        ("- length", "entry 1: must have fields, found 'length'"),
        ("- {rule: length, wait: 1}", "entry 1: no field 'wait'; fields are name, rule"),
        ("- {name: a}", "entry 1: needs a rule, or a path"),
        ("- {rule: length, path: x}", "entry 1: needs a rule, or a path"),
        ("- {rule: length, weight: much}", "entry 1: weight is 'much', a str"),
        ("- {rule: length, weight: .nan}", "weight of reward length is nan"),
        ("- {path: /nowhere/model}", "reward model model: /nowhere/model has no config.json"),
        ("- {rule: lengthy}", "lengthy: no such rule"),
        ("- {rule: length}\n- {rule: length}", "different names, found length, length"),
        ('- {rule: length}\n- {rule: format, condition: "n == 1"}', "without a condition come last"),
        ('- {rule: length, condition: "n.x == 1"}', "condition 'n.x == 1'"),
    ],
)
def test_bad_configs_are_refused(tmp_path, text, message):
    """Whatever is wrong with --reward-config is said at launch, with the entry."""
    with pytest.raises(ValueError, match=message):
        RuleRewards(entries_from_config(config(tmp_path, text)))


def test_specs():
    """--reward and --reward-model take weights after the last equals sign, and name the same thing twice apart."""
    entries = entries_from_specs(["format:a=b", "format:c=0.5", "format", "length=2"])
    assert [(e.name, e.rule, e.weight) for e in entries] == [
        ("format", "format:a=b", 1.0),
        ("format_2", "format:c", 0.5),
        ("format_3", "format", 1.0),
        ("length", "length", 2.0),
    ]
    entries = entries_from_specs(["length=2"], ["models/rm/=0.5", "other/rm"])
    assert [(e.name, e.rule, e.path, e.weight) for e in entries] == [
        ("length", "length", None, 2.0),
        ("rm", None, "models/rm/", 0.5),
        ("rm_2", None, "other/rm", 1.0),
    ]
    with pytest.raises(ValueError, match="no reward: give --reward"):
        RuleRewards(entries_from_specs([]))


@pytest.mark.parametrize("rule", ["exact_match", "math_verify", "reasoning_gym"])
def test_a_row_without_what_its_rule_reads_is_found_at_launch(rule: str):
    """The row and the rule are named before anything is generated; rules that read nothing of a row let it pass."""
    rows = [(4, {"label": "1", "answer": "1", "metadata": {}}), (7, {"prompt": "x"})]
    with pytest.raises(RewardError, match=f"row with index 7, rule {rule}: the row has no"):
        RuleRewards(entries_from_specs([rule])).check_rows(rows)
    RuleRewards(entries_from_specs(["length"])).check_rows(rows)
