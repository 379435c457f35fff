"""`ssm-trn convert SOURCE OUTPUT`: a model and its tokenizer from one format into another."""

import json
import shutil
from pathlib import Path
from typing import Any

from ssm_trn.data.token_file import META_FILE, TOKENIZER_FILE
from ssm_trn.data.tokenizer import Tokenizer
from ssm_trn.files import filling, write_whole
from ssm_trn.interop import checkpoint
from ssm_trn.interop.models import OWN_FORMAT, SPECIAL_IDS, fetch, load, require_format, save
from ssm_trn.interop.tokenizer import TOKENIZER_FILES, export_tokenizer

GENERATION_FILE = TOKENIZER_FILES[-1]
# What the tokenizers of other projects are kept in, as far as it is data alone.
_CARRIED = (
    *TOKENIZER_FILES,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    TOKENIZER_FILE,
    "chat_template.jinja",
)


def convert(source: str, output: str, format: str = OWN_FORMAT, online: bool = False) -> None:
    """Turns a model of another project into one of ssm_trn, or one of ssm_trn into that of another project.

    Formats are mamba, mamba2, falcon_mamba, llama, recurrent_gemma, qwen3_next, olmo_hybrid and kimi_linear as
    transformers writes them, and state_spaces_mamba and state_spaces_mamba2 as the authors of Mamba do. What a format
    has no word for is an error; docs/interop.md says what that is.

    Args:
        source: Folder of a model in any of these formats or of a run; with --online, a name on the hub.
        output: Folder to make; there may be an empty one.
        format: Format to write, or ssm_trn.
        online: Fetch the source from the hub.
    """
    require_format(format)
    target = Path(output)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{output} is there already: choose another folder")
    folder = fetch(source) if online else Path(source)
    config, model = checkpoint.read_config(folder), load(folder)
    with filling(target) as unfinished:
        _carry_tokenizer(folder, unfinished, keep_meta=format == OWN_FORMAT)
        save(model, unfinished, format, _special_ids(config, folder, unfinished))
    files = ", ".join(sorted(path.name for path in target.iterdir()))
    print(f"{output}: {model.parameter_count():,} parameters in the format {format}; {files}")


def _carry_tokenizer(folder: Path, target: Path, keep_meta: bool) -> None:
    """The tokenizer's files as they are; ours also in the form that transformers reads."""
    names = (*_CARRIED, META_FILE) if keep_meta else _CARRIED
    for name in names:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)
    try:
        export_tokenizer(Tokenizer.load(folder / TOKENIZER_FILE), target)
    except (FileNotFoundError, ValueError):  # there is none, or one of another project, which was copied
        return


def _special_ids(config: dict[str, Any], folder: Path, target: Path) -> dict[str, Any]:
    """The ids that generation needs, which a folder of ssm_trn keeps in generation_config.json alone."""
    for place in (folder, target):
        if (place / GENERATION_FILE).is_file():
            config = checkpoint.read_json(place / GENERATION_FILE)
            break
    ids = {name: config.get(name) for name in SPECIAL_IDS}
    if not (target / GENERATION_FILE).is_file() and any(value is not None for value in ids.values()):
        write_whole(target / GENERATION_FILE, json.dumps(ids) + "\n")
    return ids
