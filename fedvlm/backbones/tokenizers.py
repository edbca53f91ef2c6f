"""Tokenizers of known models, from the files of their folders by Hugging Face's `tokenizers` wheel."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedvlm.core.records import parsed, read_text
from fedvlm.errors import FedvlmError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Tokens

START, END = "<|startoftext|>", "<|endoftext|>"  # CLIP's
WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def special_tokens(folder: Path) -> dict[str, str]:
    """The entries of tokenizer_config.json that are texts, or objects with a text as "content"."""
    path = folder / "tokenizer_config.json"
    found = parsed(read_text(path)) if path.is_file() else {}
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in found.items()}
    return {k: v for k, v in texts.items() if isinstance(v, str)}


class FolderTokenizer:
    """What the tokenizers share: the pieces of texts, and the numbers of special tokens."""

    def __init__(self, folder: Path, tokens: Tokens):
        self.folder, self.tokens, self.named = folder, tokens, special_tokens(folder)
        tokens.no_padding()
        tokens.no_truncation()

    def number(self, key: str, default: str) -> int:
        token = self.named.get(key, default)
        found = self.tokens.token_to_id(token)
        if found is None:
            raise FedvlmError(
                f"backbone={self.folder}: the tokenizer has no token {token!r}, which its tokenizer_config.json names"
            )
        return found

    def words(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self.tokens.encode_batch([self.cleaned(t) for t in texts], add_special_tokens=False)]

    def cleaned(self, text: str) -> str:
        return text


class ClipTokenizer(FolderTokenizer):
    """CLIP's, from tokenizer.json, or from vocab.json and merges.txt: texts between a start and an end token."""

    def __init__(self, folder: Path):
        super().__init__(folder, clip_tokens(folder))
        self.bos_token_id, self.eos_token_id = self.number("bos_token", START), self.number("eos_token", END)
        self.pad_token_id = self.number("pad_token", END)

    def phrases(self, texts: Sequence[str], longest: int) -> list[list[int]]:
        return [[self.bos_token_id, *one[: longest - 2], self.eos_token_id] for one in self.words(texts)]


def clip_tokens(folder: Path) -> Tokens:
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    file, vocabulary = folder / "tokenizer.json", folder / "vocab.json"
    if file.is_file():
        return Tokenizer.from_file(str(file))
    if not vocabulary.is_file():
        raise FedvlmError(f"backbone={folder}: no tokenizer.json in that folder; copy the model's tokenizer there")
    merges = str(folder / "merges.txt")
    bpe = models.BPE.from_file(str(vocabulary), merges, end_of_word_suffix="</w>", unk_token=END)
    tokens = Tokenizer(bpe)
    spaces = normalizers.Replace(Regex(r"\s+"), " ")
    tokens.normalizer = normalizers.Sequence([normalizers.NFC(), spaces, normalizers.Lowercase()])
    split = pre_tokenizers.Split(Regex(WORDS), "removed", invert=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokens.add_special_tokens([START, END])
    return tokens


class SiglipTokenizer(FolderTokenizer):
    """Texts end with one end token, and the tower pads them. They are in lower case and, for the first SigLIP, have no
    punctuation."""

    def __init__(self, folder: Path, keeps_punctuation: bool):
        from tokenizers import Tokenizer

        if not (folder / "tokenizer.json").is_file():
            raise FedvlmError(
                f"backbone={folder}: no tokenizer.json in that folder; save it there with transformers and sentencepiece: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        super().__init__(folder, Tokenizer.from_file(str(folder / "tokenizer.json")))
        self.keeps_punctuation = keeps_punctuation
        self.bos_token_id = self.eos_token_id = self.number("eos_token", "</s>")
        self.pad_token_id = self.number("pad_token", "</s>")

    def cleaned(self, text: str) -> str:
        text = text.lower()
        return text if self.keeps_punctuation else " ".join(text.translate(NO_PUNCTUATION).split())

    def phrases(self, texts: Sequence[str], longest: int) -> list[list[int]]:
        return [[*one[: longest - 1], self.eos_token_id] for one in self.words(texts)]
