"""torchtitan's trainer as it is, on a tokenizer and a data set of its own making: arguments go on to it."""

import json
import os
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

CONFIG = """
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "{folder}/tokenizer"

[job]
dump_folder = "{folder}/outputs"

[training]
dataset = "c4_test"
dataset_path = "{folder}/data"
local_batch_size = 2
seq_len = 512
steps = 10

[lr_scheduler]
warmup_steps = 2

[metrics]
log_freq = 1

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""


def make_tokenizer(path):
    """Bytes are tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["<s>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


def make_data(path):
    path.mkdir()
    text = "A short text that is told again and again until there is enough of it to learn. "
    lines = [json.dumps({"text": f"{number}: {text * (1 + number % 5)}"}) for number in range(256)]
    (path / "data.json").write_text("\n".join(lines))


def start(folder):
    make_tokenizer(folder / "tokenizer")
    make_data(folder / "data")
    (folder / "train.toml").write_text(CONFIG.format(folder=folder))
    sys.argv[1:1] = ["--job.config_file", str(folder / "train.toml")]
    os.environ["HF_HOME"] = str(folder / "huggingface")
    from torchtitan.train import Trainer, main

    main(Trainer)


if __name__ == "__main__":
    start(Path(tempfile.mkdtemp(prefix="torchtitan-", dir=Path.cwd())))
