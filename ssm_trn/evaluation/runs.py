"""What a run folder tells about the run's data."""

from pathlib import Path
from typing import Any

import yaml


def data_settings(run_folder: str | Path) -> dict[str, Any]:
    """The settings of the run's data module (folder, block_length, ...); empty where there is no config.yaml."""
    path = Path(run_folder) / "config.yaml"
    if not path.is_file():
        return {}
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8")).get("data") or {}
        return dict(data.get("init_args") or {})
    except (yaml.YAMLError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not the configuration of a run: restore it, or remove it") from error
