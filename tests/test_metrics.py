"""The recorder: what it writes and when, and that no metric goes without a unit and a meaning."""

import json
from pathlib import Path

import pytest

from megatron_rl.metrics import METRICS, RULE_PREFIX, bytes_text, open_recorder, timed
from megatron_rl.step import StepReport


def test_nothing_is_written_before_the_first_step_ends(tmp_path: Path, capsys: pytest.CaptureFixture):
    """The folder appears with the first row; lines are printed at once; a step's values do not leak into the next."""
    recorder = open_recorder(str(tmp_path / "out"), is_main=True, progress=False)
    recorder.stage("reward", "mean 1.5", reward__mean=1.5)
    assert capsys.readouterr().out == "[reward] mean 1.5\n" and not (tmp_path / "out").exists()
    recorder.close_step(1)
    recorder.keep({"step/seconds": 2, RULE_PREFIX + "mine": 0.5})
    recorder.samples([{"response": "é"}])
    recorder.close_step(2)
    recorder.close()
    rows = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": 1, "reward/mean": 1.5}, {"step": 2, "step/seconds": 2.0, RULE_PREFIX + "mine": 0.5}]
    assert (tmp_path / "out/samples.jsonl").read_text() == '{"response": "é"}\n'
    assert list((tmp_path / "out/tensorboard").glob("events*"))


def test_other_ranks_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture):
    """They keep what they are given and write and print nothing."""
    recorder = open_recorder(str(tmp_path / "out"), is_main=False, progress=True)
    recorder.stage("reward", "mean 1.5", reward__mean=1.5)
    recorder.samples([{"a": 1}])
    recorder.close_step(1)
    recorder.close()
    assert capsys.readouterr().out == "" and not (tmp_path / "out").exists() and not recorder.shows_bars


def test_unknown_metrics_are_refused(tmp_path: Path):
    """A name that METRICS does not explain is an error where it is logged."""
    with pytest.raises(AssertionError, match="reward/meen"):
        open_recorder(str(tmp_path), True, False).keep({"reward/meen": 1.0})
    assert all(unit and meaning for unit, meaning in METRICS.values())


def test_updates_are_means_over_optimizer_steps(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Loss and gradient norm are means, the learning rate the last one; skipped steps are counted, shown and in no
    mean."""
    recorder = open_recorder(str(tmp_path / "out"), True, False)
    steps = [StepReport({"loss": loss}, loss + 1, True, 0.1) for loss in (1.0, 3.0)]
    steps.append(StepReport({"loss": float("nan")}, float("inf"), False, 0.2))
    recorder.updates({"policy": steps, "critic": []})
    assert recorder.values == {
        "policy/loss": 2.0,
        "policy/grad_norm": 3.0,
        "policy/learning_rate": 0.2,
        "policy/skipped_steps": 1.0,
    }
    assert capsys.readouterr().out == "[policy] 3 optimizer steps: loss 2, grad norm 3, 1 SKIPPED\n"
    recorder.updates({"critic": steps[2:]})
    assert capsys.readouterr().out == "[critic] 1 optimizer steps: 1 SKIPPED\n"
    assert recorder.values["critic/skipped_steps"] == 1 and "critic/loss" not in recorder.values


def test_units_of_bytes_and_time():
    """Bytes are read in powers of 1000; the timer's one element is the block's seconds."""
    assert [bytes_text(n) for n in (0, 999, 31_457_280, 2e12)] == ["0 B", "999 B", "31.5 MB", "2.0 TB"]
    with timed() as seconds:
        assert seconds == [0.0]
    assert 0 < seconds[0] < 5


def test_a_resumed_run_drops_the_rows_of_later_steps(tmp_path: Path):
    """After step 2 rows 1 and 2 stay, row 3 and a torn one go; a run from the start keeps the old file beside."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    resumed = open_recorder(str(tmp_path), is_main=True, progress=False)
    resumed.start_after(2)
    resumed.close_step(3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    fresh = open_recorder(str(tmp_path), is_main=True, progress=False)
    fresh.start_after(0)
    fresh.close_step(1)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1]
    assert len((tmp_path / "metrics.jsonl.old").read_text().splitlines()) == 3
