"""Ids are those of transformers.AutoTokenizer, chats too; what has no template or a hostile one is refused."""

import json

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders as decode
from tokenizers import models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from nanopd.config import UserError
from nanopd.models.loader import load_config
from nanopd.models.tokenizer import load_tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces\tand\n\nlines \r\n",
    "In 1984 there were 3.14159 pies (12345678901).",
    "naïve café, Ελληνικά, 日本語テスト, العربية, 👩‍👩‍👧 e\u0301",
    "<|im_start|>user\nhi<|im_end|> <|im_end|>x<s>y</s>",
    "don't we'll I'VE \u200b\ufeff \x00 \ud7ff",
    "def f(x):\n    return x**2  # %s\n" * 3,
]
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "é <|im_end|>"}],
    [{"role": r, "content": c} for r, c in (("user", "1+1?"), ("assistant", "2"), ("user", " and\n3+3? "))],
]
CHATML = (
    "{% for m in messages %}{% generation %}<|im_start|>{{ m.role }}\n{{ m['content'] | trim }}<|im_end|>\n"
    "{% endgeneration %}{% endfor %}\n  {% if add_generation_prompt %}{{ bos_token }}{{ {'é<': 1} | tojson }}{% endif %}\n"
)


def train(path, add_bos=False, config=None):
    """A small byte-level BPE tokenizer, saved as a model's directory holds it."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decode.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator(TEXTS * 3, trainer)
    if add_bos:
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(5)  # some files carry this; it must not cut prompts
    backend.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "chat_template": CHATML}
    settings |= {"eos_token": {"content": "</s>", "__type": "AddedToken"}} | (config or {})
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


KINDS = {
    "no bos": {},
    "bos by tokenizer.json": {"add_bos": True},
    "bos only in tokenizer_config.json, which does not count": {"config": {"add_bos_token": True}},
    "bos off in tokenizer_config.json, which does not count": {"add_bos": True, "config": {"add_bos_token": False}},
    "qwen2": {"config": {"tokenizer_class": "Qwen2Tokenizer"}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_transformers(kind, tmp_path):
    from transformers import AutoTokenizer

    path = train(tmp_path, **KINDS[kind])
    ours, theirs = load_tokenizer(path), AutoTokenizer.from_pretrained(path)
    if kind == "qwen2":  # its class normalises and splits in its own way: save what it really does
        theirs.save_pretrained(path)
        ours = load_tokenizer(path)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special, truncation=False)
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    for chat in CHATS:
        expected = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert ours.apply_chat_template(chat) == theirs.encode(expected, add_special_tokens=False)
    assert ours.eos_token_ids == (theirs.eos_token_id,)


def test_a_class_that_rebuilds_its_tokenizer_is_left_to_transformers(tmp_path):
    from transformers import AutoTokenizer, LlamaTokenizer

    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3, "a": 4, "b": 5, "▁a": 6} | {
        f"<0x{i:02X}>": 7 + i for i in range(256)
    }
    LlamaTokenizer(vocab=vocab, merges=[("▁", "a")], add_bos_token=True).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    file = tmp_path / "tokenizer.json"
    raw = json.loads(
        file.read_text()
    )  # as Llama 2's file has it: a normaliser marks the words, in front of every piece
    steps = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    file.write_text(json.dumps(raw | {"normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": None}))
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert Backend.from_file(str(file)).encode("</s>a é").ids != theirs.encode("</s>a é")
    for text in ("a b", " a", "</s>a é", ""):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


def test_the_default_model_speaks_like_transformers(default_model):
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(default_model), AutoTokenizer.from_pretrained(default_model)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
    for chat in CHATS:
        assert (
            ours.apply_chat_template(chat) == theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        )
    assert ours.eos_token_ids == (2,) == load_config(default_model).eos_token_ids
    assert ours.decode([10**6]) == ""


def test_the_template_of_a_file_of_its_own_and_of_a_list(tmp_path):
    path = train(
        tmp_path, config={"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "a"}]}
    )
    assert load_tokenizer(path).apply_chat_template(CHATS[0]) == load_tokenizer(path).encode("a")
    (path / "chat_template.jinja").write_text("b")
    assert load_tokenizer(path).apply_chat_template(CHATS[0]) == load_tokenizer(path).encode("b")


TEMPLATES = {
    "none": (None, "has no chat template"),
    "refuses": ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
    "not jinja": ("{% for %}", "refuses these messages"),
    "a missing field": ("{{ messages[0]['name'].first }}", "refuses these messages"),
    "reaches for python": ("{{ messages.__class__.__mro__ }}", "unsafe"),
    "changes the messages": ("{{ messages.append(1) }}", "not safely callable|unsafe"),
    "runs for ever": ("{% for i in range(10**9) %}x{% endfor %}", "refuses these messages"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_that_fail(name, tmp_path):
    template, words = TEMPLATES[name]
    tokenizer = load_tokenizer(train(tmp_path, config={"chat_template": template}))
    with pytest.raises(UserError, match=words):
        tokenizer.apply_chat_template(CHATS[0])


@pytest.mark.parametrize("damage", ["{", "[]", '{"model": 1}', None])
def test_tokenizers_that_cannot_be_read(damage, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    if damage is not None:
        (tmp_path / "tokenizer.json").write_text(damage)
    with pytest.raises(UserError, match="tokenizer cannot be read"):
        load_tokenizer(tmp_path)
