"""A tokenizer of made-up words, and prompts in them: nothing is downloaded."""

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = 1000


def tokenizer():
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(WORDS))]
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def prompts(count, length=8):
    texts = [" ".join(f"w{(row * 7 + place) % WORDS}" for place in range(length)) for row in range(count)]
    return Dataset.from_dict({"prompt": texts})
