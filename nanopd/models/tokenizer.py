"""Text to token ids and back, and a chat to a prompt.

A directory with a `tokenizer.json` is read by the `tokenizers` library alone: importing transformers takes longer than
the first answer may. Ids are those of `transformers.AutoTokenizer`; where transformers would not use the file as it is
(a class that rebuilds its tokenizer, no tokenizer.json), it is asked after all.

Chat templates are code from strangers: they run in jinja2's immutable sandbox and see messages and special tokens only.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from nanopd.config import require
from nanopd.models.config import blame, read_json

# The `tokenizer_class`es for which transformers uses tokenizer.json as it stands.
PLAIN_CLASSES = (None, "TokenizersBackend", "PreTrainedTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast")


class Tokenizer:
    """Made by `load_tokenizer`. `special_tokens` maps bos_token, eos_token, … to their texts."""

    def __init__(self, backend: Backend, special_tokens: Mapping[str, str], chat_template: str | None):
        backend.no_truncation()
        backend.no_padding()
        self._backend, self._special_tokens, self._chat_template = backend, special_tokens, chat_template
        eos = backend.token_to_id(special_tokens.get("eos_token", ""))
        # The tokenizer's own; a model may have more: ModelConfig.eos_token_ids.
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Special tokens spelled out in it are recognised; `add_special_tokens` adds the model's BOS."""
        # Surrogates are bytes that were no UTF-8, or half of a pair.
        require(not any("\ud800" <= c <= "\udfff" for c in text), "The text is not UTF-8.")
        # `encode` would do, but it keeps Python's lock: in a server nothing else could run meanwhile.
        return list(self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 (yet) come out as U+FFFD, ids without a token as nothing."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def to_json(self) -> str:
        """What a tokenizer.json holds, for libraries that read one."""
        return str(self._backend.to_str())

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a chat, up to where the assistant's answer begins. messages: {"role": …, "content": …} each.

        Raises UserError: no template, or it refuses.
        """
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment as Sandbox

        require(self._chat_template is not None, "This model has no chat template; give it a plain prompt.")

        def refuse(message: str) -> None:
            raise TemplateError(message)

        # What templates written for transformers rely on: block trimming, a few helpers, JSON without HTML escapes.
        env = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        env.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        env.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False} | options)
        # {% generation %} marks the assistant's words for training; here it becomes a statement that does nothing.
        source = re.sub(r"(\{%-?)\s*(?:end)?generation\s*(-?%\})", r"\1 set _ = 0 \2", self._chat_template or "")
        names = {"messages": [dict(m) for m in messages], "add_generation_prompt": True}
        with blame("The model's chat template refuses these messages"):  # it can fail like any program
            text = env.from_string(source).render(self._special_tokens, tools=None, **names)
        return self.encode(text, add_special_tokens=False)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model directory. Raises UserError if there is none that can be read."""
    with blame(f"{path}: the tokenizer cannot be read"):
        settings = read_json(path / "tokenizer_config.json", optional=True)
        if not (path / "tokenizer.json").is_file() or settings.get("tokenizer_class") not in PLAIN_CLASSES:
            from transformers import AutoTokenizer

            theirs = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            return Tokenizer(theirs.backend_tokenizer, theirs.special_tokens_map, theirs.chat_template)
        backend = Backend.from_file(str(path / "tokenizer.json"))  # its post-processor alone decides about BOS
        named = read_json(path / "special_tokens_map.json", optional=True) | settings
        texts = {k: v["content"] if isinstance(v, dict) else v for k, v in named.items() if k.endswith("_token")}
        tokens = {k: v for k, v in texts.items() if isinstance(v, str)}  # not add_bos_token
        file = path / "chat_template.jinja"
        template = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        return Tokenizer(backend, tokens, template)
