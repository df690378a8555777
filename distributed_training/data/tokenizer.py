"""Tokenizers: transformers' own, loaded only when text is tokenized; for GPT-2's two files, which
we ship, the library below it, which imports in no time."""

import contextlib
import filecmp
import hashlib
import importlib.metadata
import json
import logging
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from distributed_training.data import hub, pieces
from distributed_training.data.chats.align import own_spans
from distributed_training.data.chats.render import Conversation, Rendered, Renderer
from distributed_training.data.hub import TOKENIZER_FILES, TOKENIZER_ID
from distributed_training.data.pieces import ASSISTANT, Message, Piece
from distributed_training.data.text_bytes import count_bytes
from distributed_training.settings.errors import UserError
from distributed_training.settings.files import load_json

MOST_GROWTH = 64  # of a text by a tokenizer's replacements; published ones triple a space
MOST_BYTES = 100_000_000  # of a tokenizer's file: the largest published ones have 35 MB
MOST_ADDED = 100_000  # tokens beside the vocabulary's; transformers takes 75 us for each
END_OF_TEXT = "<|endoftext|>"
ASSETS = Path(__file__).parent / "assets"
EMBEDDED_DIR = ASSETS / "bpe-2048"
CHAT_TEMPLATE = ASSETS / "chat" / "chat_template.jinja"  # ours, as data/chats/align.py writes it
SETTINGS = EMBEDDED_DIR / "tokenizer_config.json"  # for transformers; every GPT-2 tokenizer's
# Pre-tokenizers after which a text may be cut as in data/pieces.py: those of Llama 3 and Qwen 2.
_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SAFE_PATTERNS = tuple(
    f"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{_PATTERN % digits}" for digits in ("{1,3}", "")
)


_NO_SENTENCEPIECE = re.compile("Could not extract SentencePiece model")
SENTENCEPIECE = "'sentencepiece>=0.2,<0.2.3' 'protobuf>=5'"  # as in pyproject.toml


class _Warnings(logging.Handler):
    """Keeps what transformers warns of while it opens a tokenizer, often why it then fails."""

    def __init__(self) -> None:
        super().__init__()
        self.texts = list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a run needs to know of its tokenizer without loading it; kept beside its tokens."""

    kind: str  # the class
    num_tokens: int  # the greatest id and one
    eos_id: int
    has_template: bool  # whether it brings a chat template
    special: dict[str, str]  # bos_token and so on
    beyond: list[str]  # the tokens of the greatest ids, the greatest first

    def check_rows(self, rows: int, model: str) -> None:
        """Raise UserError if a model with so many rows lacks one for a token."""
        if self.num_tokens > rows:
            tokens = ", ".join(map(repr, self.beyond[: min(3, self.num_tokens - rows)]))
            what = f"the tokenizer has {self.num_tokens} tokens, {model} {rows} rows for them"
            fix = "remove it from the tokenizer, or give the model rows with transformers: "
            fix += "model.resize_token_embeddings(len(tokenizer)), then save both"
            raise UserError(what, f"there is no row for {tokens}", fix)


class Tokenizer:
    """The tokenizer in a folder. Raises UserError when it is first needed and cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_gpt2 = _is_gpt2(folder)
        self._known: Facts | None = None

    def recall(self, known: dict[str, Any]) -> None:
        """Take what was kept beside tokens, so that they need not be loaded for it."""
        self._known = Facts(**known)

    @property
    def loads_fast(self) -> bool:
        """Whether it opens without transformers."""
        return self._is_gpt2

    @property
    def facts(self) -> Facts:
        if self._known is None:
            self._known = self._learn()
        return self._known

    @property
    def eos_id(self) -> int:
        """The end of a text."""
        return self.facts.eos_id

    @property
    def num_tokens(self) -> int:
        """One more than the greatest id."""
        return self.facts.num_tokens

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that decides ids: equal tokenizers have equal fingerprints."""
        digest = hashlib.sha256()
        if not self._is_gpt2:
            digest.update(importlib.metadata.version("transformers").encode())
            config = self.folder / "config.json"
            if config.is_file():  # the class depends on it
                values = load_json(config, "model")
                digest.update(
                    f"{values.get('model_type')} {values.get('tokenizer_class')}".encode()
                )
        for name in self._files:
            content = (self.folder / name).read_bytes()
            digest.update(f"{name} {len(content)} ".encode() + content)
        return digest.hexdigest()

    @property
    def _files(self) -> list[str]:
        """Names of all files of the tokenizer in its folder."""
        if self._is_gpt2:
            return list(TOKENIZER_FILES)
        found = (file for pattern in ("*", "*templates/*") for file in self.folder.glob(pattern))
        files = {file.relative_to(self.folder).as_posix(): file for file in found}
        names = sorted(filter(hub.is_tokenizer_file, files))
        for name in names:
            if files[name].exists() and not (files[name].is_file() or files[name].is_dir()):
                raise self._unreadable(f"{name} is a pipe or a device")
        return [name for name in names if files[name].is_file()]

    def _unreadable(self, why: str, fix: str = "") -> UserError:
        """Return the error for files that transformers or its library cannot use."""
        return UserError(
            f"tokenizer {self.folder} cannot be read", " ".join(why.split())[:300], fix
        )

    @cached_property
    def _loaded(self) -> Any:
        """transformers' tokenizer; the library's below it for GPT-2's files."""
        for name in self._files:
            if (self.folder / name).stat().st_size > MOST_BYTES:
                raise self._unreadable(f"{name} is longer than {MOST_BYTES // 10**6} MB")
            if (self.folder / name).read_bytes().count(b'"content"') > MOST_ADDED:
                raise self._unreadable(f"{name} adds more than {MOST_ADDED:,} tokens")
        if self._is_gpt2:
            return self._load_gpt2()
        from transformers import AutoTokenizer
        from transformers.utils import logging as theirs

        warnings = _Warnings()
        theirs.set_verbosity_warning()
        theirs.disable_default_handler()
        theirs.add_handler(warnings)
        try:
            return AutoTokenizer.from_pretrained(
                self.folder, trust_remote_code=False, local_files_only=True
            )
        except BaseException as error:  # whatever a class of transformers raises for its files
            _pass_on_interrupts(error)
            fix = "give the folder that the model's tokenizer was saved in"
            # Then it takes the file for one of tiktoken, and asks for that package.
            matching = [text for text in warnings.texts if _NO_SENTENCEPIECE.match(text)]
            why = matching[0] if matching else ""
            why = why.partition(" due to ")[2].partition(" Falling back")[0]
            why = why or f"{type(error).__name__}: {error}"
            if re.search("Protobuf|protobuf|SentencePiece library but it was not found", why):
                fix = f"type: pip install {SENTENCEPIECE}"
            raise self._unreadable(why, fix) from None
        finally:
            theirs.remove_handler(warnings)
            theirs.enable_default_handler()
            theirs.set_verbosity_error()

    def _load_gpt2(self) -> Any:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        try:
            model = models.BPE.from_file(*(str(self.folder / name) for name in TOKENIZER_FILES))
        except Exception as error:  # the Rust library raises plain Exception
            fix = "give a folder with tokenizer.json, or vocab.json and merges.txt, or set "
            fix += "tokenizer to auto"
            raise self._unreadable(str(error), fix) from None
        bpe = Tokenizer(model)
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        if bpe.token_to_id(END_OF_TEXT) is None:
            raise UserError(f"tokenizer {self.folder} has no {END_OF_TEXT} token")
        bpe.add_special_tokens([END_OF_TEXT])
        return bpe

    @cached_property
    def _library(self) -> Any:
        """The tokenizer of the library `tokenizers` that gives the ids; None: Python code does."""
        if self._is_gpt2:
            return self._loaded
        from transformers import PreTrainedTokenizerFast as Fast

        cls = type(self._loaded)
        own = any(
            getattr(cls, name, None) is not getattr(Fast, name, None)
            for name in ("__call__", "_encode_plus", "_batch_encode_plus")
        )
        if not self._loaded.is_fast or own:
            return None
        library = self._loaded.backend_tokenizer
        # As transformers calls it: what was saved of an earlier call does not apply.
        library.no_padding()
        library.no_truncation()
        library.encode_special_tokens = self._loaded.split_special_tokens
        for part in (library.normalizer, library.decoder):
            longer = 1 if part is None else _growth(json.loads(part.__getstate__()))
            if longer > MOST_GROWTH:
                times = f"{min(longer, 1e18):.3g} times as long"
                what = f"tokenizer {self.folder} makes a text up to {times}"
                raise UserError(what, f"at most {MOST_GROWTH} times is accepted")
        return library

    def _learn(self) -> Facts:
        loaded = self._loaded
        vocabulary: dict[str, int] = loaded.get_vocab()
        names = {}
        if self._is_gpt2:
            eos = END_OF_TEXT
            eos_id: Any = vocabulary[END_OF_TEXT]
        else:
            eos = loaded.eos_token
            eos_id = loaded.eos_token_id
            names = {name: str(token) for name, token in loaded.special_tokens_map.items()}
            if len(vocabulary) <= len(set(names.values())):
                what = f"tokenizer {self.folder} has no vocabulary"
                why = f"{type(loaded).__name__}, which transformers takes for it, found no files"
                fix = "give the folder that the model's tokenizer was saved in"
                raise UserError(what, why, fix)
            if not isinstance(eos_id, int):
                what = f"tokenizer {self.folder} has no end-of-text token"
                fix = 'name one as "eos_token" in its tokenizer_config.json'
                raise UserError(what, f"its eos_token is {eos!r}", fix)
        return Facts(
            kind="GPT2Tokenizer" if self._is_gpt2 else type(loaded).__name__,
            num_tokens=max(vocabulary.values()) + 1,
            eos_id=eos_id,
            has_template=self._templates is not None,
            special={**names, "eos_token": str(eos)},
            beyond=sorted(vocabulary, key=vocabulary.__getitem__, reverse=True)[:3],
        )

    # Ids

    @cached_property
    def special_ids(self) -> np.ndarray:
        """Ids of all special tokens."""
        if self._is_gpt2:
            return np.array([self.eos_id])
        added = self._loaded.added_tokens_decoder
        ids = {i for i, token in added.items() if token.special} | set(self._loaded.all_special_ids)
        return np.array(sorted(ids))

    @cached_property
    def special_tokens(self) -> list[str]:
        """All special tokens as they stand in a text."""
        if self._is_gpt2:
            return [END_OF_TEXT]
        return [
            str(token) for token in self._loaded.convert_ids_to_tokens(self.special_ids.tolist())
        ]

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Match any of them."""
        return re.compile("|".join(map(re.escape, self.special_tokens)))

    def count_bytes(self) -> np.ndarray:
        """Bytes of text that each id stands for, as in data/text_bytes.py."""
        return count_bytes(self._loaded, self.special_ids, self.num_tokens)

    @cached_property
    def can_cut(self) -> bool:
        """Whether a text may be cut as in data/pieces.py: its parts' ids are those of the whole.
        So for byte-level BPE whose words end before a space, and end before a line feed after a
        letter; without tokens that hold spaces, or take some."""
        if self._is_gpt2:
            return True
        if self._library is None:
            return False
        described = json.loads(self._library.to_str())
        normalizer = described["normalizer"]
        splits = described["pre_tokenizer"] or {}
        splits = splits.get("pretokenizers", [splits])
        *before, last = splits
        patterns = [split.get("pattern", {}).get("Regex") for split in before]
        return (
            described["model"]["type"] == "BPE"
            and normalizer in (None, {"type": "NFC"}, {"type": "Sequence", "normalizers": []})
            and last.get("type") == "ByteLevel"
            and not last["add_prefix_space"]
            and last["use_regex"] == (not before)
            and len(before) <= 1
            and all(pattern in _SAFE_PATTERNS for pattern in patterns)
            and all(split["behavior"] == "Isolated" and not split["invert"] for split in before)
            and not any(
                token["lstrip"] or token["rstrip"] or token["single_word"]
                or not {" ", "\n"}.isdisjoint(token["content"])
                for token in described["added_tokens"]
            )
        )  # fmt: skip

    @cached_property
    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids that a text begins and ends with, such as bos."""
        bare, whole = (
            np.array(self._encode(["a"], special=special)[0]) for special in (False, True)
        )
        if whole.max(initial=0) >= self.num_tokens:
            raise self._unreadable(f"it puts id {whole.max()} around texts, which no token has")
        for first in range(len(whole) - len(bare) + 1):
            if (added := len(whole) - len(bare)) > MOST_GROWTH:
                what = f"tokenizer {self.folder} puts {added:,} tokens around a text"
                raise UserError(what, f"at most {MOST_GROWTH} are accepted")
            if np.array_equal(whole[first : first + len(bare)], bare):
                return whole[:first], whole[first + len(bare) :]
        return whole[:0], whole[:0]

    def _encode(self, texts: Sequence[str], *, special: bool) -> list[Any]:
        if self._library is not None:
            # "Fast" leaves out where in the text each token is, which takes as long as the rest.
            try:
                coded = self._library.encode_batch_fast(list(texts), add_special_tokens=special)
            except BaseException as error:  # such as a vocabulary without its unk_token
                _pass_on_interrupts(error)
                raise self._unreadable(str(error)) from None
            return [encoding.ids for encoding in coded]
        return list(self._loaded(list(texts), add_special_tokens=special)["input_ids"])

    def encode_batch(self, texts: Sequence[str], *, special: bool = False) -> list[np.ndarray]:
        """One int32 array of ids per text; `special`: with what every text begins and ends with."""
        return [np.array(ids, np.int32) for ids in self._encode(texts, special=special)]

    def encode(self, batch: Sequence[Piece]) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """(ids, whether each is in the loss or None for all) of each piece: in a row those of
        `tokenizer(text)` for a text."""
        found: dict[int, tuple[np.ndarray, np.ndarray | None]] = {}
        for special in (False, True):
            plain = list[int]()
            spanned = list[int]()
            for place, piece in enumerate(batch):
                if (not piece.templated and piece.begins and piece.ends) == special:
                    (plain if piece.spans is None else spanned).append(place)
            texts = [batch[place].text for place in plain]
            coded = self.encode_batch(texts, special=special) if texts else []
            for place, ids in zip(plain, coded, strict=True):
                found[place] = ids, None
            for place in spanned:
                found[place] = self._encode_spans(batch[place], special=special)
        rows = []
        before, after = self.ends
        for place, piece in enumerate(batch):
            ids, mask = found[place]
            if not piece.templated and piece.begins != piece.ends:
                ids = np.concatenate([before, ids] if piece.begins else [ids, after])
            rows.append((ids.astype(np.int32, copy=False), mask))
        return rows

    def _encode_spans(self, piece: Piece, *, special: bool) -> tuple[np.ndarray, np.ndarray]:
        """A token is in the loss if one of its characters is, as in transformers; but not a mark
        beside an answer that only takes its white space."""
        assert piece.spans is not None
        if self._library is not None:
            encoding = self._library.encode(piece.text, add_special_tokens=special)
            ids = np.array(encoding.ids, np.int32)
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            # Some tokenizers leave spaces out of their tokens' places; those follow the one before.
            lasts = np.maximum.accumulate(offsets[:, 1]) if len(offsets) else offsets[:, 1]
            firsts = np.minimum(offsets[:, 0], np.concatenate([[0], lasts[:-1]]))
        else:
            ids = np.array(self._encode([piece.text], special=special)[0], np.int32)
            edges = {
                edge: self._count_before(piece.text, edge, ids=ids, special=special)
                for span in piece.spans
                for edge in span
            }
        mask = np.zeros(len(ids), bool)
        for first, last in piece.spans:
            if self._library is not None:
                inside = np.flatnonzero((lasts > first) & (firsts < last))
                for edge in (0, -1):
                    if len(inside):
                        start, end = int(firsts[inside[edge]]), int(lasts[inside[edge]])
                        shared = piece.text[max(start, first) : min(end, last)]
                        if not shared.strip() and piece.text[start:end].strip():
                            inside = np.delete(inside, edge)
                if len(inside):
                    mask[inside[0] : inside[-1] + 1] = True
            else:
                mask[edges[first] : edges[last]] = True
        return ids, mask

    def _count_before(self, text: str, edge: int, *, ids: np.ndarray, special: bool) -> int:
        """Tokens before a character, for a tokenizer that does not say where its tokens are: those
        of the text before it, if the ids of the whole begin with them."""
        if edge == len(text):
            return len(ids)
        first = len(self.ends[0]) if special else 0
        for start in (text[:edge], text[:edge].rstrip()):  # a mark may take the space before it
            before = np.array(self._encode([start], special=False)[0], np.int32)
            if np.array_equal(ids[first : first + len(before)], before):
                return first + len(before)
        what = f"an answer's tokens cannot be found with the tokenizer {self.folder}"
        why = f"{self.facts.kind} does not say where its tokens are, and the ids of the text "
        raise UserError(what, f"{why}before the answer do not begin those of all of it")

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text for ids; `special`: with special tokens."""
        if self._is_gpt2:
            kept = [i for i in ids if special or i != self.eos_id]
            return str(self._loaded.decode(kept, skip_special_tokens=False))
        options = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
        return str(self._loaded.decode(list(ids), **options))

    # Conversations

    @cached_property
    def _templates(self) -> tuple[str, str] | None:
        """The tokenizer's own, without tools and with them."""
        if self._is_gpt2 or not self._loaded.chat_template or is_chat(self.folder):
            return None
        choose = self._loaded.get_chat_template
        try:
            plain, with_tools = choose(None, tools=None), choose(None, tools=[{}])
        except ValueError as error:
            what = f"tokenizer {self.folder} has no default chat template"
            raise UserError(what, str(error)) from None
        if not isinstance(plain, str) or not isinstance(with_tools, str):
            raise UserError(f"the chat template of tokenizer {self.folder} is no text", repr(plain))
        return plain, with_tools

    @cached_property
    def renderer(self) -> Renderer | None:
        """What renders the tokenizer's own template; None if it brings none."""
        if self._templates is None:
            return None
        names = dict(self._loaded.special_tokens_map)
        return Renderer(self._templates, names, self.special_tokens)

    def align(self, batch: Sequence[tuple[str, Conversation]]) -> list[list[Rendered]]:
        """The samples of each (place, conversation), by the model's template or ours."""
        if self.renderer is not None:
            return self.renderer.align(batch)
        eos = self.facts.special["eos_token"]
        return [own_spans(conversation, eos, where) for where, conversation in batch]

    @property
    def is_templated(self) -> bool:
        """Whether a template of its own writes all special tokens of a conversation."""
        return self.facts.has_template

    def talks(self, form: str | None) -> bool:
        """Whether texts of this form are conversations."""
        return form == pieces.MESSAGES or (form == pieces.PROMPT and self.facts.has_template)

    @cached_property
    def end_of_answer(self) -> int:
        """The token that ends an answer: the first special one after it, or that of a text."""
        if self.renderer is None:
            return self.eos_id
        said = [{"role": "user", "content": "?"}, {"role": ASSISTANT, "content": "answered"}]
        for messages in (said, [{"role": "system", "content": "."}, *said]):  # some need a system's
            with contextlib.suppress(UserError):
                text = self.renderer.align([("", Conversation(messages))])[0][-1].text
                ids = self.encode_batch([text.rpartition("answered")[2]])[0]
                return int([*ids[np.isin(ids, self.special_ids)], self.eos_id][0])
        return self.eos_id

    def ends_of(self, *, chat: bool) -> list[int]:
        """Return the tokens after which the model stops: that of a text first, and in a `chat` that
        of an answer."""
        return list(dict.fromkeys([self.eos_id, self.end_of_answer] if chat else [self.eos_id]))

    @property
    def generation_tokens(self) -> dict[str, int]:
        """Return bos and pad as generation_config.json names them. Without a pad token, end-of-text
        pads."""
        if self._is_gpt2:
            return {"bos_token_id": self.eos_id, "pad_token_id": self.eos_id}
        tokens = {"pad_token_id": self.eos_id}
        for name in ("bos_token_id", "pad_token_id"):
            token = getattr(self._loaded, name)
            if token is not None:
                tokens[name] = token
        return tokens

    def begin(self, text: str) -> list[int]:
        """Ids of a text that goes on."""
        before = self.ends[0].tolist()
        return [*before, *self.encode_batch([text])[0].tolist()]

    def ask(self, said: list[Message]) -> list[int]:
        """Ids of a conversation up to where the answer to its last message begins."""
        if self.renderer is not None:
            return self.encode_batch([self.renderer.ask(said)])[0].tolist()
        answer = {"role": ASSISTANT, "content": ""}
        (sample,) = own_spans(Conversation([*said, answer]), self.facts.special["eos_token"], "")
        return self.begin(sample.text[: sample.spans[-1][0]])

    def save(self, folder: Path, *, chat: bool = False) -> None:
        """Write the tokenizer so that `AutoTokenizer.from_pretrained(folder)` opens it; with `chat`
        it has a template, the model's own or ours."""
        folder.mkdir(parents=True, exist_ok=True)
        if self._is_gpt2:
            shutil.copyfile(SETTINGS, folder / SETTINGS.name)
        for name in self._files:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(self.folder / name, folder / name)
        if chat and not self.facts.has_template:
            bos = "{{ bos_token }}" if len(self.ends[0]) else ""
            (folder / CHAT_TEMPLATE.name).write_text(bos + CHAT_TEMPLATE.read_text())


def _pass_on_interrupts(error: BaseException) -> None:
    """Raise `error` if it is Ctrl-C or the like. A panic of the Rust library is no Exception."""
    if isinstance(error, KeyboardInterrupt | SystemExit | UserError):
        raise error


def _growth(part: dict[str, Any]) -> int:
    """Return how often as long a normalizer or decoder can make a text."""
    members = part.get("normalizers") or part.get("decoders")
    if members:
        return math.prod(map(_growth, members))
    lengthens = part.get("content") or part.get("prepend") or ""
    return max(1, len(lengthens))


def is_chat(folder: Path) -> bool:
    """Whether a model in this folder was trained on chats in our template."""
    file = folder / CHAT_TEMPLATE.name
    return file.is_file() and file.read_bytes().endswith(CHAT_TEMPLATE.read_bytes())


def _is_gpt2(folder: Path) -> bool:
    """Whether the folder holds GPT-2's two files and nothing else that decides ids: ours, what we
    export, and GPT-2's own from the Hub."""
    if not all((folder / name).is_file() for name in TOKENIZER_FILES):
        return False
    if f"models--{TOKENIZER_ID.replace('/', '--')}" in folder.parts:
        return True
    settings = folder / SETTINGS.name
    others = ("tokenizer.json", "added_tokens.json", "special_tokens_map.json")
    if any((folder / name).exists() for name in others):
        return False
    if (folder / CHAT_TEMPLATE.name).exists() and not is_chat(folder):
        return False
    if settings.exists():
        return filecmp.cmp(settings, SETTINGS, shallow=False)  # False for a pipe
    config = folder / "config.json"
    return not config.is_file() or load_json(config, "model").get("model_type") == "gpt2"
