"""Folders of checkpoints, and train_ppo.py stopped and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import launch
import psutil
import pytest
from models.tiny import tiny_model, tiny_tokenizer

from megatron_rl.checkpoint import files
from megatron_rl.checkpoint.files import check_files, latest_whole


def checkpoint(folder: Path, step: int, whole: bool = True) -> Path:
    """A checkpoint of two small files."""
    partial = files.begin(folder, step)
    (partial / "policy").mkdir()
    (partial / "policy" / "__0_0.distcp").write_bytes(bytes(range(256)) * 4)
    (partial / "state.json").write_text(json.dumps({"step": step}))
    if not whole:
        return partial
    files.write_manifest(partial, {name: files.digest(partial / name) for name in files.contents(partial)})
    return files.commit(partial)


def test_last_whole_checkpoint_is_found(tmp_path):
    """A checkpoint that was never finished is left aside with a warning, and none at all is no error."""
    assert latest_whole(tmp_path / "nothing") is None
    checkpoint(tmp_path, 8, whole=False)
    said: list[str] = []
    assert latest_whole(tmp_path, said.append) is None
    checkpoint(tmp_path, 2)
    newest = checkpoint(tmp_path, 4)
    assert (tmp_path / files.LATEST).read_text() == "4\n"
    assert latest_whole(tmp_path, said.append) == newest
    assert "iter_0000008.partial was never finished" in said[-1]
    assert latest_whole(newest) == newest


def test_checkpoints_of_an_abandoned_run_are_left_aside(tmp_path):
    """A run that went back to an older checkpoint is resumed from what it wrote, not from what it had given up."""
    abandoned = [checkpoint(tmp_path, step) for step in (2, 4, 6)]
    newest = checkpoint(tmp_path, 3)
    said: list[str] = []
    assert latest_whole(tmp_path, said.append) == newest
    assert [str(path) in line for path, line in zip(abandoned[:0:-1], said, strict=True)] == [True, True]
    assert "is left aside" in said[0]
    (tmp_path / files.LATEST).unlink()
    assert latest_whole(tmp_path) == abandoned[-1]


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_shares_of_the_files_are_all_of_them(tmp_path, parts):
    """However many processes check a checkpoint, each broken file is found by one of them."""
    folder = checkpoint(tmp_path, 1)
    for name in files.contents(folder):
        (folder / name).write_bytes(b"")
    found = [problem for part in range(parts) for problem in check_files(folder, part, parts)]
    assert len(found) == len(set(found)) == 2


@pytest.mark.parametrize("harm", ["truncate", "flip", "remove", "manifest"])
def test_broken_files_are_named(tmp_path, harm):
    """A shard that is cut, altered or gone is named and the one before taken; with none left it is an error."""
    older, newer = checkpoint(tmp_path, 2), checkpoint(tmp_path, 4)
    shard = newer / "policy" / "__0_0.distcp"
    if harm == "truncate":
        os.truncate(shard, 100)
    elif harm == "flip":
        shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    elif harm == "remove":
        shard.unlink()
    else:
        shard = newer / files.MANIFEST
        shard.write_text("{")
    (problem,) = check_files(newer)
    assert str(shard) in problem
    said: list[str] = []
    assert latest_whole(tmp_path, said.append) == older
    assert str(shard) in said[0] and "iter_0000004 is broken" in said[0]
    with pytest.raises(ValueError, match="no whole checkpoint"):
        latest_whole(newer)


def test_retention_keeps_the_last_ones(tmp_path):
    """--keep-last K keeps K checkpoints, clears leftovers, and touches none newer than the one just written."""
    for step in (1, 2, 3, 9):
        checkpoint(tmp_path, step)
    checkpoint(tmp_path, 7, whole=False)
    files.retain(tmp_path, newest=3, keep_last=2)
    assert [files.step_of(path) for path in files.checkpoints(tmp_path)] == [9, 3, 2]
    assert not files.unfinished(tmp_path)
    files.retain(tmp_path, newest=9, keep_last=None)
    assert len(files.checkpoints(tmp_path)) == 3


# ---- train_ppo.py -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and prompts that do not divide by the batch."""
    folder = tmp_path_factory.mktemp("task")
    tiny_tokenizer(tiny_model(folder / "model", "llama3"))
    (folder / "p.jsonl").write_text("".join(json.dumps({"prompt": f"say {i} "}) + "\n" for i in range(10)))
    return folder


def command(task: Path, out: Path, iters: int, *more: object) -> list[str]:
    fixed = f"""--hf-model {task}/model --train-data {task}/p.jsonl --no-apply-chat-template --reward length
        --max-prompt-length 16 --max-response-length 12 --rollout-batch-size 4 --n-samples-per-prompt 2
        --global-batch-size 4 --kl-coef 0.05 --kl-target 0.1 --kl-horizon 100 --lr 1e-3 --lr-warmup-iters 3
        --lr-decay-style cosine --lr-decay-iters 20 --no-progress --no-save-hf --output-dir {out}
        --vllm-args enforce_eager=true --train-iters {iters}"""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    return [*launcher, str(launch.ROOT / "train_ppo.py"), *fixed.split(), *map(str, more)]


def end_of(folder: Path) -> dict[str, object]:
    """Digests of all tensors and generators, and the script's state: data position and KL coefficient."""
    manifest = {
        name: value for name, value in files.read_manifest(folder).items() if name.endswith((".distcp", ".pt"))
    }
    assert len(manifest) == 5  # two each of policy and critic, generators
    return manifest | {"state": json.loads((folder / "state.json").read_text())["state"]}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_resume_is_bitwise(tmp_path, task):
    """4 steps equal 2 + 2 and 1 + 1 + 1 + 1, across an epoch's end: weights, optimizers, generators, data, KL."""
    save = ("--save-interval", 1, "--save")
    one = tmp_path / "one"
    launch.check(launch.run(*command(task, one, 4, *save, one), timeout=300))
    two = tmp_path / "two"
    out = launch.check(
        launch.run(*command(task, two, 4, *save, two, "--load", one / "iter_0000002", "--async-save"), timeout=300)
    )
    assert "critic weights, optimizer and schedule (optimizer step 4); generators of every rank; data" in out
    assert end_of(one / "iter_0000004") == end_of(two / "iter_0000004")
    four, begin = tmp_path / "four", one / "iter_0000001"
    for iters in (2, 3, 4):
        launch.check(launch.run(*command(task, four, iters, *save, four, "--load", begin), timeout=300))
        begin = four
    assert end_of(one / "iter_0000004") == end_of(four / "iter_0000004")
    changed = command(task, four, 4, "--load", four, "--gamma", 0.5, "--exit-on-missing-checkpoint")
    out = launch.check(launch.run(*changed, timeout=300))
    assert "warning: the checkpoint's run had other flags: --gamma 1.0 -> 0.5" in out
    missing = command(task, four, 4, "--load", tmp_path / "nothing", "--exit-on-missing-checkpoint")
    result = launch.run(*missing, timeout=300)
    assert result.returncode != 0 and "no checkpoint is there" in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("whom", ["rank", "torchrun"])
def test_sigterm_finishes_the_step_and_saves(tmp_path, task, whom):
    """SIGTERM: the step is finished and saved, and a rank's exit status is 0; torchrun passes its own on and waits."""
    log = tmp_path / "log"
    with open(log, "w") as file:
        flags = command(task, tmp_path / "out", 5000, "--save", tmp_path / "save")
        process = subprocess.Popen(flags, cwd=launch.ROOT, stdout=file, stderr=file, env=launch.environment({}))
    try:
        begun = time.monotonic()
        while "[step] 2" not in log.read_text():
            assert process.poll() is None and time.monotonic() - begun < 300, log.read_text()[-2000:]
            time.sleep(0.1)
        (worker,) = [
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if "train_ppo.py" in child.cmdline()[2]
        ]
        (process if whom == "torchrun" else worker).send_signal(signal.SIGTERM)
        status = process.wait(60)
        assert whom == "torchrun" or status == 0, log.read_text()[-2000:]
    finally:
        launch.kill_tree(process)
    text = log.read_text()
    assert "stopped by SIGTERM after step" in text
    (saved,) = files.checkpoints(tmp_path / "save")
    assert check_files(saved) == [] and f"after step {files.step_of(saved)} of" in text
