"""Load tokenizers with transformers. A tokenizer is loaded only when it is first needed, so that
ranks that find their tokens in the cache do not import transformers."""

import contextlib
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from distributed_training.data import hub, pieces, splits
from distributed_training.data.chats.render import Conversation, Renderer
from distributed_training.data.offsets import mask_spans
from distributed_training.data.pieces import ASSISTANT, Message, Piece, Span
from distributed_training.settings.config import today
from distributed_training.settings.errors import UserError, describe
from distributed_training.settings.files import is_outside, load_model_json, shown

ASSETS = Path(__file__).parent / "assets"
EMBEDDED_DIR = ASSETS / "bpe-2048"
# Template for tokenizers that have none of their own
CHAT_TEMPLATE = ASSETS / "chat" / "chat_template.jinja"
# Code at the beginning of a chat template that adds a system prompt. TEXT is a string literal.
_SYSTEM_CODE = (
    "{% if messages and messages[0]['role'] not in ['system', 'developer'] %}"
    "{% set messages = [{'role': 'system', 'content': TEXT}] + messages %}{% endif %}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Properties of a tokenizer that a run needs. They are stored with the tokens in the cache, so
    that later runs need not load the tokenizer."""

    kind: str  # name of the tokenizer's class
    num_tokens: int  # largest id plus one
    eos_id: int
    has_template: bool  # whether the tokenizer has its own chat template
    special: dict[str, str]  # special tokens by name, such as bos_token

    def check_rows(self, rows: int, model: str) -> None:
        """Raise UserError if the tokenizer has more tokens than `rows`, the number of rows in the
        embedding of `model`."""
        if self.num_tokens > rows:
            what = f"the tokenizer has {self.num_tokens:,} tokens"
            why = f"the embedding of {model} has only {rows:,} rows"
            fix = "remove the last tokens, or add rows in transformers: call "
            fix += "model.resize_token_embeddings(len(tokenizer)), and save both"
            raise UserError(what, why, fix)


class Tokenizer:
    """Tokenizer stored in a folder. The tokenizer is loaded when it is first needed. If loading
    fails, UserError is raised at that point.

    transformers selects the tokenizer's class by `model_type` and `tokenizer_class` in the model's
    config.json. `model` contains these keys as the model is exported (`ModelSpec.class_keys`). They
    take precedence over the config.json in the folder, so that the run and its export use the same
    class. Chat templates use `date` in ISO format, by default today, as the current date. If
    `template` is given, it replaces the tokenizer's own chat template. `system` is the system
    prompt of conversations that have none."""

    def __init__(
        self,
        folder: Path,
        model: Mapping[str, str] | None = None,
        date: str | None = None,
        template: str | None = None,
        system: str | None = None,
    ) -> None:
        self.folder = folder
        self._template = template
        self._system_code = ""  # beginning of the chat template
        if system is not None:
            self._system_code = _SYSTEM_CODE.replace("TEXT", json.dumps(system, ensure_ascii=False))
        self._model = dict(model or {})
        self._date = date or today()

    @cached_property
    def _class_keys(self) -> dict[str, str]:
        """Keys of a config.json by which transformers selects the tokenizer's class."""
        config = self.folder / "config.json"
        values = load_model_json(config) if config.is_file() else {}
        stored = {key: str(values[key]) for key in hub.CLASS_KEYS if values.get(key)}
        return stored | self._model

    def restore_facts(self, facts: dict[str, Any]) -> None:
        """Use facts that were stored in the token cache instead of loading the tokenizer."""
        self.facts = Facts(**facts)

    @property
    def eos_id(self) -> int:
        """Id of the end-of-text token."""
        return self.facts.eos_id

    @property
    def num_tokens(self) -> int:
        """Largest id plus one."""
        return self.facts.num_tokens

    @property
    def vocabulary(self) -> dict[str, int]:
        """Id of each token. Reading this property loads the tokenizer."""
        return self._hf_tokenizer.get_vocab()

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the ids of a string. Tokenizers with equal
        fingerprints produce equal ids."""
        digest = hashlib.sha256(importlib.metadata.version("transformers").encode())
        digest.update(f"{sorted(self._class_keys.items())}".encode())
        contents = {name: (self.folder / name).read_bytes() for name in self.files}
        if self._template or self._system_code:
            contents["template"] = f"{self._system_code}{self._template}".encode()
        for name, content in contents.items():
            digest.update(f"{name} {len(content)} ".encode() + content)
            if b"strftime_now" in content:
                digest.update(self._date.encode())
        return digest.hexdigest()

    @property
    def files(self) -> list[str]:
        """Names of the tokenizer's files, relative to its folder. Raises UserError if one of them
        is a link to a file elsewhere, because the files are exported."""
        paths = [*self.folder.glob("*"), *self.folder.glob("*templates/*")]
        names = [path.relative_to(self.folder).as_posix() for path in paths if path.is_file()]
        tokenizer_files = sorted(filter(hub.is_tokenizer_file, names))
        for name in tokenizer_files:
            is_text = name.endswith((".json", ".jinja", ".txt", ".model"))
            if is_text and is_outside(self.folder / name, self.folder):
                what = f"tokenizer file {self.folder / name} is a link to a file in another folder"
                raise UserError(what, fix="replace the link by a copy")
        return tokenizer_files

    @cached_property
    def _hf_tokenizer(self) -> Any:
        """Tokenizer object from transformers. Raises UserError if the tokenizer cannot be
        loaded."""
        what = f"tokenizer {self.folder} cannot be read"
        fix = "use the folder that the model's tokenizer was saved in, or set tokenizer to auto"
        if not self.files:
            raise UserError(what, "the folder contains no tokenizer files", fix)
        from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer
        from transformers.utils import logging as transformers_logging

        # transformers explains in warnings why it cannot read a tokenizer.model file.
        transformers_logging.set_verbosity_warning()
        # For an unknown type, transformers reads the folder alone. The class of the built-in
        # tokenizer does not depend on the model.
        config = None
        if self.folder != EMBEDDED_DIR and self._class_keys.get("model_type") in CONFIG_MAPPING:
            config = AutoConfig.for_model(**self._class_keys)
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                self.folder, config=config, trust_remote_code=False
            )
        except Exception as error:  # transformers can raise any error here.
            why = describe(error)
            if "trust_remote_code" in str(error):
                why = "its tokenizer_config.json refers to custom code, which is never run"
            raise UserError(what, why, fix) from None
        finally:
            transformers_logging.set_verbosity_error()
        template = self._template or tokenizer.chat_template
        if isinstance(template, dict):  # one template for each purpose, such as tool_use
            template = {name: self._system_code + text for name, text in template.items()}
        elif template is not None:
            template = self._system_code + template
        tokenizer.chat_template = template
        return tokenizer

    @cached_property
    def backend(self) -> Any:
        """Object from the `tokenizers` library that computes the ids, or None if Python code
        computes them."""
        if not self._hf_tokenizer.is_fast:
            return None
        backend = self._hf_tokenizer.backend_tokenizer
        # transformers resets these settings at each call and ignores their values in the file.
        backend.no_padding()
        backend.no_truncation()
        return backend

    def check_splits(self) -> None:
        """Raise UserError if the tokenizer's class does not split text as tokenizer.json says. Some
        classes of transformers replace the pre-tokenizer in the file, depending on the model's
        type."""
        file = self.folder / "tokenizer.json"
        if self.backend is None or not file.is_file():
            return
        settings = self.folder / "tokenizer_config.json"
        declared = load_model_json(settings).get("tokenizer_class") if settings.is_file() else ""
        is_replaced = str(declared).removesuffix("Fast") != self.facts.kind
        if is_replaced and (self.folder / "config.json").is_file():
            return  # For some types of models, transformers ignores the class in their folders.
        from tokenizers import Tokenizer as Backend

        if splits.split_probe(Backend.from_file(str(file))) != splits.split_probe(self.backend):
            what = f"tokenizer {self.folder} cannot be used with this model"
            why = f"{self.facts.kind}, the class that transformers uses for "
            why += f"{shown(self._class_keys)}, splits text differently than tokenizer.json"
            fix = "use the model's own tokenizer, or set tokenizer_class in "
            fix += "tokenizer_config.json to TokenizersBackend"
            raise UserError(what, why, fix)

    @cached_property
    def facts(self) -> Facts:
        """Properties of the tokenizer. The tokenizer is loaded unless `restore_facts` was called.
        Raises UserError if the tokenizer has no vocabulary or no end-of-text token."""
        hf_tokenizer = self._hf_tokenizer
        vocabulary = self.vocabulary
        special = {name: str(token) for name, token in hf_tokenizer.special_tokens_map.items()}
        if len(vocabulary) <= len(set(special.values())):
            what = f"tokenizer {self.folder} has no vocabulary"
            why = f"its class {type(hf_tokenizer).__name__} found no vocabulary in the folder"
            fix = "use the folder that the model's tokenizer was saved in"
            raise UserError(what, why, fix)
        if hf_tokenizer.eos_token_id is None:
            what = f"tokenizer {self.folder} has no end-of-text token"
            raise UserError(what, fix='set "eos_token" in its tokenizer_config.json')
        return Facts(
            kind=type(hf_tokenizer).__name__,
            num_tokens=max(vocabulary.values()) + 1,
            eos_id=hf_tokenizer.eos_token_id,
            has_template=self._hf_tokenizer.chat_template is not None,
            special=special,
        )

    # Ids

    @cached_property
    def special_ids(self) -> np.ndarray:
        """Ids of all special tokens."""
        added = self._hf_tokenizer.added_tokens_decoder
        return np.array(sorted(i for i, token in added.items() if token.special))

    @property
    def unknown_id(self) -> int:
        """Id of the token that replaces unknown characters, or -1 if there is no such token. The id
        is also -1 if the end-of-text token serves as the unknown token, as in byte-level BPE, which
        can encode all characters."""
        token = self._hf_tokenizer.unk_token_id
        return -1 if token is None or token == self.eos_id else int(token)

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Pattern that matches any special token, as it appears in text."""
        tokens = self._hf_tokenizer.convert_ids_to_tokens(self.special_ids.tolist())
        return re.compile("|".join(re.escape(str(token)) for token in tokens))

    @cached_property
    def can_cut(self) -> bool:
        """True if data/pieces.py may cut documents."""
        return self.backend is not None and splits.can_cut(self.backend)

    @cached_property
    def added_ids(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids added at the beginning of every string, such as the bos id, and ids added at its
        end."""
        (bare_ids,) = self.encode_texts(["a"])
        (full_ids,) = self.encode_texts(["a"], add_special_tokens=True)
        start = full_ids.tolist().index(bare_ids[0])
        return full_ids[:start], full_ids[start + len(bare_ids) :]

    def encode_texts(
        self, texts: Sequence[str], *, add_special_tokens: bool = False
    ) -> list[np.ndarray]:
        """Return an int32 array of ids for each string. If `add_special_tokens` is set, add the
        special tokens that the tokenizer puts at the beginning and end of a string."""
        options = {"add_special_tokens": add_special_tokens}
        if self.backend is None:
            rows = (self._hf_tokenizer(text, **options)["input_ids"] for text in texts)
        else:  # The "fast" variant omits character offsets, which would double the time.
            encodings = self.backend.encode_batch_fast(list(texts), **options)
            rows = (encoding.ids for encoding in encodings)
        return [np.array(ids, np.int32) for ids in rows]

    def encode_pieces(self, batch: Sequence[Piece]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return (ids, loss mask) for each piece, without the special tokens of `added_ids`.
        Concatenating the ids of the pieces of a document gives the ids of the whole document."""
        encoded = iter(self.encode_texts([piece.text for piece in batch if piece.spans is None]))
        rows = []
        for piece in batch:
            if piece.spans is None:
                ids = next(encoded)
                rows.append((ids, np.ones(len(ids), bool)))
            else:
                rows.append(self._encode_spans(piece.text, piece.spans))
        return rows

    def _encode_spans(self, text: str, spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, loss mask) for a text of which only `spans` are in the loss. Raises
        UserError if the tokenizer does not tell which characters a token stands for."""
        what = f"tokenizer {self.folder} cannot be used for these answers"
        if self.backend is None:
            why = f"{self.facts.kind} does not tell which characters a token stands for"
            raise UserError(what, why, "use a fast tokenizer, which has a tokenizer.json")
        encoding = self.backend.encode(text, add_special_tokens=False)
        try:
            mask = mask_spans(text, spans, encoding.offsets, self.backend.normalizer)
        except ValueError as error:
            fix = "remove these characters, or use another tokenizer"
            raise UserError(what, f"{error}", fix) from None
        return np.array(encoding.ids, np.int32), mask

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode `ids` to a string. If `skip_special_tokens` is set, special tokens are
        omitted."""
        options = {
            "skip_special_tokens": skip_special_tokens,
            "clean_up_tokenization_spaces": False,
        }
        return str(self._hf_tokenizer.decode(list(ids), **options))

    # Conversations

    @cached_property
    def _templates(self) -> tuple[str, str]:
        """Chat templates for conversations without and with tools: the tokenizer's own or, if it
        has none, the built-in template."""
        if self._hf_tokenizer.chat_template is None:
            first_tokens = self._hf_tokenizer.convert_ids_to_tokens(self.added_ids[0].tolist())
            template = "".join([*first_tokens, self._system_code, CHAT_TEMPLATE.read_text()])
            return template, template
        get_template = self._hf_tokenizer.get_chat_template
        return get_template(None, tools=None), get_template(None, tools=[{}])

    @cached_property
    def renderer(self) -> Renderer:
        """Renderer of the chat template, which writes all special tokens."""
        names = dict(self._hf_tokenizer.special_tokens_map)
        return Renderer(self._templates, names, self.special_pattern, self._date)

    def is_chat_form(self, form: str | None) -> bool:
        """Return whether training text of the form `form` (data/pieces.py) is treated as
        conversations."""
        return form == pieces.MESSAGES or (form == pieces.PROMPT and self.facts.has_template)

    @cached_property
    def answer_end_ids(self) -> list[int]:
        """Ids of the tokens that end an answer and a tool call: the first special token after an
        answer and the last one of a call, or end-of-text if there is none. Under some templates,
        the mark of the next turn ends both, such as GLM-4.5's <|user|> and <|observation|>."""
        call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        answer = {"role": ASSISTANT, "content": "answered"}
        end_ids = self._find_marks(answer)[:1]
        end_ids += self._find_marks({**answer, "tool_calls": [call]})[-1:]
        return end_ids or [self.eos_id]

    def _find_marks(self, answer: Message) -> list[int]:
        """Return the special tokens after an answer, or end-of-text if there is none. Return [] if
        the template cannot render the answer."""
        pair = [{"role": "user", "content": "?"}, answer]
        system = {"role": "system", "content": "."}
        for messages in (pair, [system, *pair]):  # Some templates require a system message.
            with contextlib.suppress(UserError):
                text = self.renderer.render_samples(Conversation(messages), "")[-1].text
                (ids,) = self.encode_texts([text.rpartition("answered")[2]])
                return ids[np.isin(ids, self.special_ids)].tolist() or [self.eos_id]
        return []

    @property
    def generation_tokens(self) -> dict[str, int]:
        """Ids of the bos and pad tokens, keyed by their names in generation_config.json. If the
        tokenizer has no pad token, end-of-text is used for padding."""
        tokens = {"pad_token_id": self.eos_id}
        for name in ("bos_token_id", "pad_token_id"):
            token = getattr(self._hf_tokenizer, name)
            if token is not None:
                tokens[name] = token
        return tokens

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of the prompt `text`, preceded by the ids that the tokenizer adds at the
        beginning of every string. Generation continues after these ids."""
        prefix = self.added_ids[0].tolist()
        return [*prefix, *self.encode_texts([text])[0].tolist()]

    def encode_chat_prompt(self, messages: list[Message]) -> list[int]:
        """Return the ids of a conversation up to the start of the answer to its last message.
        Raises UserError if the template cannot render the conversation."""
        (ids,) = self.encode_texts([self.renderer.render_prompt(messages)])
        return ids.tolist()

    def decode_question(self, ids: list[int]) -> str:
        """Return the text of a prompt from `encode_chat_prompt` without what the template adds."""
        mark = "QUESTION"
        prompt = self.renderer.render_prompt([{"role": "user", "content": mark}])
        before, _, after = prompt.partition(mark)
        text = self.decode(ids, skip_special_tokens=False)
        if before:  # some templates write nothing before a message
            text = text.rpartition(before)[2]
        return text.removesuffix(after)

    def save(self, folder: Path, *, chat: bool = False) -> None:
        """Write the tokenizer to `folder` so that `AutoTokenizer.from_pretrained` can load it. If
        `chat` is set and the tokenizer has no chat template of its own, include the built-in
        template."""
        folder.mkdir(parents=True, exist_ok=True)
        self._hf_tokenizer.save_pretrained(folder)
        if chat and not self.facts.has_template:
            (folder / CHAT_TEMPLATE.name).write_text(self._templates[0])
