"""Tokenizers in Hugging Face's tokenizer.json, or GPT-2's two files. No torch import."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from distributed_training.data import pieces
from distributed_training.data.hub import TOKENIZER_FILES, TOKENIZER_JSON
from distributed_training.data.pieces import ChatTemplate, Message
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import load_json

END_OF_TEXT = "<|endoftext|>"
EMBEDDED_DIR = Path(__file__).parent / "assets" / "bpe-2048"
CHAT_TEMPLATE = Path(__file__).parent / "assets" / "chat" / "chat_template.jinja"
SETTINGS = EMBEDDED_DIR / "tokenizer_config.json"  # for transformers; every GPT-2 tokenizer's


class Tokenizer:
    """Text to token ids and back; UserError for a folder that cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.has_json = (folder / TOKENIZER_JSON).is_file()
        settings: dict[str, Any] = {}
        if self.has_json and (folder / SETTINGS.name).is_file():
            settings = load_json(folder / SETTINGS.name, "tokenizer")
        self._bpe = self._read()
        # Marks such as <|endoftext|> are tokens where a template wrote them, not in a text.
        self._bpe.encode_special_tokens = True
        vocabulary = self._bpe.get_vocab()
        marks = {"bos_token": "", "eos_token": END_OF_TEXT}
        for key in marks:
            mark = settings.get(key) or marks[key]
            marks[key] = mark["content"] if isinstance(mark, dict) else mark  # in older files
        eos = marks["eos_token"]
        if eos not in vocabulary:
            raise UserError(f"tokenizer {folder} has no {eos} token")
        self.eos_id = self.end_of_answer = vocabulary[eos]
        self.num_tokens = max(vocabulary.values()) + 1
        self.bos_ids: list[int] = []  # what a text begins with
        self.chat: ChatTemplate | None = None  # the model's own
        if not self.has_json:
            return
        self._with_marks = self._read()
        self.bos_ids = [i for i in self._with_marks.encode("").ids if i != self.eos_id]
        file = folder / CHAT_TEMPLATE.name
        template = file.read_text() if file.is_file() else settings.get("chat_template")
        if isinstance(template, list):  # several by name
            template = {each["name"]: each["template"] for each in template}.get("default")
        if template and not is_chat(folder):
            self.chat = ChatTemplate(template, **marks)
            self.end_of_answer = vocabulary.get(self.chat.end_of_answer(), self.eos_id)

    def _read(self) -> Any:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        try:
            if self.has_json:
                return Tokenizer.from_file(str(self.folder / TOKENIZER_JSON))
            model = models.BPE.from_file(*(str(self.folder / name) for name in TOKENIZER_FILES))
        except Exception as error:  # the Rust library raises plain Exception
            fix = "give a folder with tokenizer.json, or vocab.json and merges.txt, or set "
            fix += "tokenizer to auto"
            raise UserError(f"tokenizer {self.folder} cannot be read", str(error), fix) from None
        bpe = Tokenizer(model)
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        return bpe

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all that decides ids: equal tokenizers have equal fingerprints."""
        names = (TOKENIZER_JSON,) if self.has_json else TOKENIZER_FILES
        contents = b"".join((self.folder / name).read_bytes() for name in names)
        if self.has_json:
            contents += f"{self.eos_id} {self.chat and self.chat.text}".encode()
        return hashlib.sha256(contents).hexdigest()

    def encode_batch(self, texts: list[str], *, marks: bool = False) -> list[np.ndarray]:
        """One int32 array of ids per text; with `marks`, special tokens that it has are such."""
        bpe = self._with_marks if marks else self._bpe
        # "Fast" leaves out where in the text each token is, which takes as long as all the rest.
        found = bpe.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(coded.ids, dtype=np.int32) for coded in found]

    def decode(self, ids: list[int]) -> str:
        """Text for a list of ids, special tokens left out."""
        return self._bpe.decode([i for i in ids if i not in (self.eos_id, self.end_of_answer)])

    def talks(self, form: str | None) -> bool:
        """Whether texts of this form are conversations."""
        return form == pieces.MESSAGES or (form == pieces.PROMPT and self.chat is not None)

    def begin(self, text: str) -> list[int]:
        """Ids of a text that goes on."""
        return [*self.bos_ids, *self.encode_batch([text])[0].tolist()]

    def ask(self, said: list[Message]) -> list[int]:
        """Ids of a conversation up to where the answer to its last message begins."""
        if self.chat:
            return self.encode_batch([self.chat.render(said, ask=True)], marks=True)[0].tolist()
        ids = self.bos_ids.copy()
        answer = {"role": pieces.ASSISTANT, "content": ""}
        for piece in pieces.cut_messages([*said, answer])[:-1]:
            ids += self.encode_batch([piece.text])[0].tolist() + [self.eos_id] * piece.eos
        return ids

    def save(self, folder: Path, *, chat: bool = False) -> None:
        """Copy the files, so that `AutoTokenizer.from_pretrained(folder)` opens them; with `chat`
        it has a template, the model's own or that of data/pieces.py."""
        folder.mkdir(parents=True, exist_ok=True)
        files = [*(self.folder / name for name in TOKENIZER_FILES), SETTINGS]
        if self.has_json:
            own = (TOKENIZER_JSON, SETTINGS.name, CHAT_TEMPLATE.name)
            files = [file for name in own if (file := self.folder / name).is_file()]
        if chat and not self.chat:
            files.append(CHAT_TEMPLATE)
        for file in files:
            shutil.copyfile(file, folder / file.name)


def is_chat(folder: Path) -> bool:
    """Whether a model in this folder was trained on chats in our template."""
    file = folder / CHAT_TEMPLATE.name
    return file.is_file() and file.read_bytes() == CHAT_TEMPLATE.read_bytes()
